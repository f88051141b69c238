"""The numbers of explain against figures made by hand, Transformers' models, and the events of a real step."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, ModelError, ModelFileError
from quire.events import EventKind
from quire.insight.explain import explanation
from quire.insight.explain.device import Device, find_device
from quire.insight.explain.explanation import Explained
from quire.insight.explain.phases import Op, Phase
from quire.insight.explain.report import to_html
from quire.insight.explain.subject import PRESETS, Settings, open_subject
from quire.runtime.machine_limits import MachineLimits
from quire.sampling_params import SamplingParams
from tests.adapters.builders import random_matrices, write_peft
from tests.cli.tiny_directory import CONFIG, make_tiny_directory
from tests.engine.builders import run
from tests.models.oracle import make_oracle, num_language_parameters
from tests.models.tiny_configs import TINY_CONFIGS, full_config


def explain(model: str, *, with_ops: bool = False, device: str = "A100-80GB", **settings: Any) -> Explained:
    return explanation.explain(open_subject(model), Settings(device=device, **settings), with_ops=with_ops)


def ops_of(phase: Phase) -> dict[str, Op]:
    return {op.name.replace("self_attn.", "").replace("mlp.", ""): op for op in phase.ops()}


def transformers_count(fields: dict[str, Any]) -> int:
    """Parameters of the language model that Transformers makes of a config, without allocating them."""
    fields = {name: value for name, value in fields.items() if name != "architectures"}
    with torch.device("meta"):
        return num_language_parameters(make_oracle(fields.pop("model_type"), fields))


@pytest.mark.parametrize("model", PRESETS)
def test_parameters_of_presets_are_those_of_transformers(model: str) -> None:
    report = explain(model, batches=(1,), ctx=16).report
    assert report.quantity("Parameters", "total").value == transformers_count(dict(PRESETS[model]))


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_every_architecture_is_explained_alone_and_on_two_ranks(model_type: str, tmp_path: Path) -> None:
    """GPT-2's odd vocabulary among them."""
    fields = full_config(model_type, next(iter(TINY_CONFIGS[model_type].values())))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    alone, half = (explain(str(tmp_path), batches=(2,), ctx=8, tp=tp) for tp in (1, 2))
    assert alone.report.quantity("Parameters", "total").value == transformers_count(fields)
    assert half.rank.num_parameters < alone.rank.num_parameters
    assert half.phases[0].bytes_sent > 0
    assert alone.phases[0].bytes_sent == 0


def test_embeddings_sums_are_not_those_of_layers(tmp_path: Path) -> None:
    """Gemma 4 looks up two tables, and its later layers have no cache of their own."""
    fields = full_config("gemma4_text", next(iter(TINY_CONFIGS["gemma4_text"].values())))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    report = explain(str(tmp_path), batches=(1,), ctx=8, tp=2).report
    found = report.quantity("Prefill of 8 tokens", "all-reduces per layer")
    assert (found.value, found.values) == (2, "(12 - 2) / 5")


def test_deepseek_reads_only_the_routed_experts() -> None:
    decode = explain("DeepSeek-V3", batches=(1,), ctx=1, dtype="bfloat16").phases[1]
    # 37 billion parameters are active per token (DeepSeek-V3, sec. 1); the embedding is looked up.
    assert decode.num_bytes / 2 == pytest.approx(36.7e9, rel=0.01)
    assert decode.flops / 2 == pytest.approx(36.7e9, rel=0.01)
    assert ops_of(decode)["experts.gate_up_proj"].cost.num_bytes == 8 * 2 * 2048 * 7168 * 2
    prefill = explain("DeepSeek-V3", batches=(1,), ctx=4096).phases[0]
    assert prefill.num_bytes / 2 == pytest.approx(671e9, rel=0.01)


def test_mixture_reads_the_experts_of_its_tokens() -> None:
    explained = explain("Qwen3-30B-A3B", batches=(1, 32), ctx=1, dtype="bfloat16")
    _, one, many = explained.phases
    quantity = explained.report.quantity
    # "30.5B in total and 3.3B activated" (the model's card).
    assert quantity("Parameters", "total").value == pytest.approx(30.5e9, rel=0.002)
    active = quantity("Parameters", "active").value
    assert active == pytest.approx(3.35e9, rel=0.001)
    # The embedding is looked up, not read.
    assert one.num_bytes / 2 == pytest.approx(active - 151936 * 2048, rel=0.001)
    assert one.flops / 2 == pytest.approx(active - 151936 * 2048, rel=0.001)
    ups = ops_of(one)["experts.gate_up_proj"]
    assert (ups.shape, ups.cost.num_bytes) == ("8×2048×1536", 8 * 1536 * 2048 * 2)
    expected = 128 * (1 - (1 - 8 / 128) ** 32)
    assert ops_of(many)["experts.down_proj"].cost.num_bytes == pytest.approx(expected * 768 * 2048 * 2)
    assert many.flops == pytest.approx(32 * one.flops)


def test_deepseek_shares_split_heads_columns_and_vocabulary() -> None:
    whole, rank = explain("DeepSeek-V3", batches=(1,), ctx=64), explain("DeepSeek-V3", batches=(1,), ctx=64, tp=8)
    assert rank.rank.num_parameters == pytest.approx(whole.rank.num_parameters / 8, rel=0.02)
    with pytest.raises(ConfigError, match=r"does not divide 128 attention heads.*--tensor-parallel-size 2"):
        explain("DeepSeek-V3", tp=3, batches=(1,))


def test_flops_are_those_of_the_events_of_a_real_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_tiny_directory(tmp_path)
    monkeypatch.setenv("QUIRE_TRACE", "events")
    engine = LLMEngine.from_options(str(directory), num_blocks_override=16, device="cpu", max_model_len=64)
    engine.add_request("a", {"prompt_token_ids": [5, 9, 2, 4]}, SamplingParams(temperature=0, max_tokens=1))
    run(engine)
    (event,) = engine.events.of(EventKind.OPS)
    monkeypatch.setattr(explanation, "find_device", lambda name: this_cpu())
    prefill = explain(str(directory), device="cpu", batches=(1,), ctx=4).phases[0]
    assert prefill.flops == sum(op.flops for op in event.data["ops"])
    assert prefill.num_bytes == sum(op.num_bytes for op in event.data["ops"])


def this_cpu() -> Device:
    """This machine with limits that need not be measured."""
    hardware = find_device("L4").hardware
    cpu = type(hardware)("cpu", 2**34, 2**34, True, 1, "a CPU")
    return Device(cpu, MachineLimits(1e10, {"int8": 1e12, "bf16": 5e11, "fp32": 1e11}), "made up")


def test_memory_plan_says_what_fits_and_which_setting_to_change() -> None:
    (memory,) = [part for part in explain("Llama-2-7B", batches=(256,), ctx=4096).report.sections
                 if part.title.startswith("Memory plan")]  # fmt: skip
    (advice,) = [note for note in memory.notes if "--batch 256 does not fit" in note]
    batch, ctx = (int(advice.split(f"--{name} ")[index].split()[0]) for name, index in (("batch", 2), ("ctx", 2)))
    for settings in ({"batches": (batch,), "ctx": 4096}, {"batches": (256,), "ctx": ctx}):
        sections = explain("Llama-2-7B", **settings).report.sections
        assert not any("does not fit" in note for part in sections for note in part.notes)
    report = explain("DeepSeek-V3", batches=(1,), ctx=64).report
    assert any("does not fit: the weights need" in note for part in report.sections for note in part.notes)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "architectures"])
def test_config_without_a_field_names_the_field(tmp_path: Path, field: str) -> None:
    path = tmp_path / "config.json"
    fields = {name: value for name, value in CONFIG.items() if name not in (field, "model_type")}
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelFileError, match=field):
        explain(str(path))
    path.write_text('{"hidden_size": ')
    with pytest.raises(ModelFileError, match="not valid JSON"):
        explain(str(path))
    deepseek = {name: value for name, value in PRESETS["DeepSeek-V3"].items() if name != "kv_lora_rank"}
    path.write_text(json.dumps(deepseek))
    with pytest.raises(ModelError, match="kv_lora_rank"):
        explain(str(path))


def test_page_has_every_number_and_no_reference_to_other_files() -> None:
    report = explain("TinyLlama", with_ops=True, batches=(1,)).report
    page = to_html(report)
    assert page.startswith("<!doctype html>")
    for forbidden in ("http://", "https://", "<script", "<link", "src=", "url("):
        assert forbidden not in page
    for section in report.sections:
        for item in section.quantities:
            assert item.shown in page


def test_roofline_has_each_phase_at_its_intensity_and_under_the_roof() -> None:
    page = to_html(explain("Llama-2-7B", batches=(1, 64), ctx=2048).report)
    (drawing,) = re.findall(r"<svg.*?</svg>", page)
    root = ElementTree.fromstring(drawing)
    (roof,) = [item.attrib["points"] for item in root.iter() if item.tag == "polyline"]
    (left, low), (ridge, top), (right, _) = [tuple(map(float, point.split(","))) for point in roof.split()]
    circles = [(float(item.attrib["cx"]), float(item.attrib["cy"])) for item in root.iter() if item.tag == "circle"]
    assert len(circles) == 3
    (prefill, at_peak), (one, _), (many, _) = circles
    assert left <= one < many < ridge < prefill < right
    for x, y in circles:
        roof_y = top if x > ridge else low + (top - low) * (x - left) / (ridge - left)
        assert y >= roof_y - 1
    # Decodes of one stream are limited by memory: on the slope, but for the little time of fp32.
    assert circles[1][1] == pytest.approx(low + (top - low) * (one - left) / (ridge - left), abs=2)
    assert at_peak > top, "int8 has the highest rate of the A100, and the prefill is computed in bf16"


def test_predictions_follow_the_calibrated_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.insight.explain.device import Calibration

    curve = [(1, 2e-12), (512, 1e-12)]
    calibration = Calibration(
        "a CPU", 1, "any", {}, 10**8, [(10**6, 4e10), (10**8, 2e10), (10**9, 1e10)], {"bf16": curve, "f32": curve},
        {"bf16": (1e-10, 1e-12, 3e-12)}, {"Norm": (1e-6, 0.0)}, (1e-4, 1e-5),
    )  # fmt: skip
    device = this_cpu()
    monkeypatch.setattr(
        explanation, "find_device",
        lambda name: Device(device.hardware, device.limits, device.source, None, calibration),
    )  # fmt: skip
    prefill, one, many = explain("TinyLlama", device="cpu", batches=(1, 8), ctx=512).phases
    products = 1_100_048_384 - 32000 * 2048 - (2 * 22 + 1) * 2048
    num_ops = sum(1 for item, _ in prefill.instructions if type(item).__name__ not in ("Gemm", "Attend"))
    head = 32000 * 2048
    # Weights of 2 GB come from memory at half the rate at which the curve was measured.
    attention = 22 * 512 * (2 * 4 * 64 * 2 * 1e-10 + 4 * 2048 * 1e-12)
    expected = 2 * products * 2e-12 * 2 + attention + num_ops * 1e-6 + 1e-4 + 1e-5
    assert one.predicted_s == pytest.approx(expected, rel=1e-6)
    assert prefill.predicted_s == pytest.approx(
        2 * (products - head) * 512 * 1e-12 + 2 * head * 2e-12 * 2 + 22 * 4 * 2048 * 512 * 513 / 2 * 3e-12
        + num_ops * 1e-6 + 1e-4 + 1e-5, rel=1e-6,
    )  # fmt: skip
    assert many.predicted_s is not None


def test_hub_id_that_is_not_cached_costs_its_config_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def fetch(source: Any, **options: Any) -> Path:
        fetched.append((source.repository, source.file))
        return tmp_path

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("quire.insight.explain.subject.fetch_from_hub", fetch)
    # Weights in 8 bit do not matter where none are read.
    config = {**PRESETS["DeepSeek-V3"], "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = explain("deepseek-ai/DeepSeek-V3", batches=(1,), ctx=16).report
    assert fetched == [("deepseek-ai/DeepSeek-V3", "config.json")]
    assert report.quantity("Parameters", "total").value == 671_026_419_200


def test_adapters_count_as_memory_and_show_their_bytes_and_work(tmp_path: Path) -> None:
    model = make_tiny_directory(tmp_path / "model")
    matrices = random_matrices(model, 1, rank=4)
    path = write_peft(tmp_path / "one", matrices)
    report = explain(str(model), batches=(3,), ctx=8, lora=("4", f"one={path}")).report
    (section,) = [section for section in report.sections if section.title == "Adapters"]
    num_values = sum(a.size + b.size for a, b in matrices.values())
    assert [(row[0], *row[2:]) for row in section.rows] == [
        (name, len(matrices), num_values, 2 * num_values, 2 * num_values) for name in ("any", "one")
    ]
    assert report.quantity("Adapters", "read by 3 streams with an adapter each").value == 3 * 2 * num_values
    for wrong in ("0", "257", "one"):
        with pytest.raises(ConfigError, match="--lora"):
            explain(str(model), batches=(1,), ctx=8, lora=(wrong,))
    with pytest.raises(ModelFileError, match="no such adapter"):
        explain(str(model), batches=(1,), ctx=8, lora=("x=/none",))
