"""Compare what fits with which settings, of known models and devices, with arithmetic by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import KV_SCALE_BYTES
from quire.errors import ConfigError
from quire.insight.explain.device import DATA_SHEETS, EXAMPLE_SHEET, find_device
from quire.insight.explain.explanation import Explained
from quire.insight.explain.report import Section
from tests.insight.explain.test_explanation import explain

GIB = 2**30


def section(explained: Explained, title: str) -> Section:
    (found,) = [part for part in explained.report.sections if part.title.startswith(title)]
    return found


def rows(explained: Explained, title: str = "Settings side by side") -> list[dict[str, Any]]:
    part = section(explained, title)
    return [dict(zip(part.header, row, strict=True)) for row in part.rows]


def test_prompt_in_more_chunks_than_a_table_shows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--chunk 1 cuts .* more than 1024 chunks: --chunk 976563 fits"):
        explain("Llama-2-7B", ctx=10**9, chunk=1, batches=(1,))
    found = explain("Llama-2-7B", ctx=2000, chunk=20, batches=(1,))
    assert len(rows(found, "Prompt of 2000 tokens in chunks of 20")) == 101


def test_prompt_of_10000_tokens_has_its_kv_scores_and_activations_by_chunk() -> None:
    found = explain("Llama-2-7B", ctx=10_000, chunk=4096, batches=(1,))
    quantity = found.report.quantity
    assert quantity("KV cache", "1 request of 10000 tokens").value == 10_000 * 32 * 2 * 4096 * 2 == 5_242_880_000
    scores = quantity("Prefill of 10000 tokens", "QKᵀ of a layer").value
    assert scores == 2 * 10_000**2 * 4096 == 819_200_000_000
    chunks = rows(found, "Prompt of 10000 tokens in chunks of 4096")
    assert [row["positions"] for row in chunks] == ["0-4095", "4096-8191", "8192-9999", "all"]
    # Gate and up of 11,008 each, in 16 bit.
    assert [row["largest activation"] for row in chunks] == [4096 * 44_032, 4096 * 44_032, 1808 * 44_032, 4096 * 44_032]
    assert [row["KV cache after it"] for row in chunks[:3]] == [length * 524_288 for length in (4096, 8192, 10_000)]
    assert chunks[1]["QKᵀ of a layer"] == 2 * 4096 * 4096 * 8192
    assert chunks[1]["scores, if written"] == 32 * 4096 * 8192 * 2
    # Chunks save memory, not work; only the logits of a chunk that ends no prompt are left out.
    assert chunks[-1]["FLOPs"] == found.phases[0].flops
    assert any("more than the model's context of 4096" in note for note in found.report.notes)


def test_llama_2_13b_on_a100_40gb_holds_seven_requests_of_2000_tokens() -> None:
    found = explain("Llama-2-13B", ctx=2000, device="A100-40GB")
    plan = {item.name: item.value for item in section(found, "Memory plan").quantities}
    assert plan["weights"] == 13_015_864_320 * 2
    assert found.report.quantity("KV cache", "per token").value == 800 * 2**10
    left = int(0.9 * 40 * GIB) - 26_031_728_640 - plan["activations and overhead"]
    assert plan["requests of 2000 tokens that fit"] == (left // (16 * 800 * 2**10) - 1) // 125 == 7


def test_three_memory_plans_of_tinyllama_on_24_gb_stand_side_by_side() -> None:
    found = explain("TinyLlama", ctx=2048, device="RTX-4090", gpu_memory_utilization=(0.9, 0.3),
                    kv_dtype=("auto", "int8"), max_num_seqs=(256,))  # fmt: skip
    plans = {(row["memory share"], row["KV type"]): row for row in rows(found)}
    assert list(plans) == [("0.9", "bfloat16"), ("0.9", "int8"), ("0.3", "bfloat16"), ("0.3", "int8")]
    weights = 1_100_048_384 * 2
    # 22 layers, 4 KV heads of 64: 16 bit, or 8 bit and an fp32 scale.
    for key, block_bytes in ((("0.9", "bfloat16"), 32 * 22_528), (("0.3", "int8"), 32 * 22 * 2 * 4 * (64 + 4))):
        row = plans[key]
        assert row["usable"] == int(float(key[0]) * 24 * GIB)
        assert row["left for KV"] == row["usable"] - weights - row["step"]
        assert row["KV tokens"] == 32 * (row["left for KV"] // block_bytes - 1)
        assert row["fit"] == row["KV tokens"] // 2048
    low, narrow = plans["0.3", "bfloat16"], plans["0.3", "int8"]
    assert (low["fit"], narrow["fit"], plans["0.9", "bfloat16"]["fit"]) == (103, 194, 438)
    assert narrow["tokens/s at most"] > low["tokens/s at most"]
    assert narrow["price"] == "another share for other programs; KV is rounded to 8 bit"


def test_settings_of_one_question_are_compared_with_remedies() -> None:
    found = rows(explain("TinyLlama", ctx=2048, device="RTX-4090", max_num_seqs=(256,), max_model_len=(2048,)))
    assert [row["price"] for row in found] == [
        "as asked", "another share for other programs", "another share for other programs; KV is rounded to 8 bit",
        "KV is rounded to 8 bit", "more than 64 requests wait", "above 1024 tokens: refused",
    ]  # fmt: skip
    asked, *_, fewer, shorter = found
    assert fewer["step"] < asked["step"]
    assert shorter["fit"] == 2 * asked["fit"]
    assert fewer["tokens/s at most"] < asked["tokens/s at most"] < shorter["tokens/s at most"]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "fp8_e5m2"])
def test_8_bit_kv_is_explained_on_a_gpu_and_said_to_be_of_another_engine(kv_dtype: str) -> None:
    found = explain("Llama-2-7B", ctx=1024, batches=(4,), kv_dtype=(kv_dtype,))
    per_token = 2 * 32 * 32 * (128 + (4 if kv_dtype == "int8" else 0))
    assert found.report.quantity("KV cache", "per token").value == per_token
    decode = found.phases[1]
    read = sum(item.cache_bytes_read(step) for item, step in decode.instructions)
    assert read == 4 * 1024 * per_token
    assert any("on CPUs only" in note for note in section(found, "Memory plan").notes)


def test_block_size_and_budget_change_the_plan() -> None:
    default, changed = (explain("TinyLlama", ctx=100, **options) for options in
                        ({}, {"block_size": 64, "max_num_batched_tokens": 512}))  # fmt: skip
    assert "512 tokens" in section(changed, "Memory plan").quantities[2].formula
    assert section(changed, "KV cache").notes == ["1 group of layers, blocks of 64 tokens"]
    small, large = (section(one, "Memory plan").quantities[2].value for one in (changed, default))
    assert small < large


def test_utilization_on_a_cpu_is_said_to_have_no_effect() -> None:
    found = explain("TinyLlama", device="Graviton3", gpu_memory_utilization=(0.5,))
    notes = section(found, "Memory plan").notes
    assert any("no effect on a CPU" in note and "kv_cache_memory_bytes" in note for note in notes)
    assert {row["memory share"] for row in rows(found)} == {"-"}


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_context_beyond_a_cpus_default_kv_cache_is_explained_with_the_refusal_as_a_note(kv_dtype: str) -> None:
    found = explain("Llama-2-7B", device="Graviton3", ctx=20_000, kv_dtype=(kv_dtype,), batches=(1,))
    per_token = 32 * 2 * 32 * (128 * 2 if kv_dtype == "auto" else 128 + KV_SCALE_BYTES["int8"])
    assert found.report.quantity("KV cache", "1 request of 20000 tokens").value == 20_000 * per_token
    plan = section(found, "Memory plan")
    assert found.report.quantity(plan.title, "requests of 20000 tokens that fit").value >= 1
    (note,) = [note for note in plan.notes if "refused" in note]
    assert "--kv-cache-memory-bytes" in note
    assert not any("does not fit:" in other for other in plan.notes)


def test_lengths_that_contradict_each_other_name_what_fits() -> None:
    with pytest.raises(ConfigError, match="--ctx 512 exceeds --max-model-len 256: --ctx 256 fits"):
        explain("TinyLlama", max_model_len=(256,))
    with pytest.raises(ConfigError, match="128 combinations"):
        explain("TinyLlama", max_num_seqs=tuple(range(1, 129)))


def test_published_format_is_named_where_there_are_no_weights() -> None:
    assert any("stored in mxfp4" in note for note in explain("gpt-oss-20b", batches=(1,)).report.notes)


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_every_device_explains_a_model(name: str) -> None:
    found = explain("GPT-2", device=name, batches=(1,))
    assert all(phase.floor_s > 0 for phase in found.phases)
    assert found.config.dtype == ("float16" if name == "GTX-1060" else "bfloat16")


def test_data_sheet_of_a_file_is_the_device(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(EXAMPLE_SHEET)
    device = find_device(str(path))
    assert (device.name, device.hardware.total_memory_bytes, device.link_bytes_per_s) == ("my GPU", 24 * 10**9, None)
    path.write_text(json.dumps({**json.loads(EXAMPLE_SHEET), "kind": "cpu", "source": "measured by hand"}))
    found = explain("TinyLlama", device=str(path), batches=(1,))
    assert found.config.uses_plan
    assert found.report.quantity("Device: my GPU", "memory read").reason == "measured by hand"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": -1}, r"memory_bytes.*one is \{"),
        ({"memory": 1}, "unknown field `memory`"),
        ({"flops_per_s": {"bf16": 1e12}}, "no rate of fp32"),
        ({"flops_per_s": {"tf32": 1e12, "fp32": 1e12}}, "tf32"),
        (None, "truncated"),
    ],
)
def test_bad_data_sheet_names_the_field_and_an_example(
    change: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{" if change is None else json.dumps({**json.loads(EXAMPLE_SHEET), **change}))
    with pytest.raises(ConfigError, match=message):
        find_device(str(path))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        find_device(str(tmp_path / "none.json"))
