"""Adapters against the model that they make when they are merged into the weights; and one request, many ways."""

import dataclasses
import itertools
import json
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.adapters import LoRARequest
from quire.engine.llm import LLM
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, ModelFileError, QuireError, RequestError, UnsupportedModelError
from quire.outputs import RequestOutput
from quire.runtime import adapter_pool
from quire.sampling_params import BeamSearchParams, SamplingParams
from tests.adapters.builders import random_matrices, write_gguf, write_merged, write_peft
from tests.tiny_engine import build, engine_with, prompt, write_tiny_llama
from tests.weights.gguf_cases import ARRAY, DATA, STRING, UINT32, array, gguf_bytes, key_value, string, tensor_info

RUNS = itertools.count()
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [prompt(0, 20), prompt(1, 70), prompt(2, 33), prompt(3, 41)]
NAMES = ["one", None, "two", "one"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_peft(folder / "one", random_matrices(base, 1)),
        "two": write_peft(folder / "two", random_matrices(base, 2, rank=7, modules=("k_proj", "up_proj", "o_proj"))),
    }


def start(base: Path, adapters: dict[str, Path], **options: Any) -> LLMEngine:
    return build(
        base, lora={name: str(path) for name, path in adapters.items()}, block_size=16, batch_invariant=True, **options
    )


@pytest.fixture(scope="module")
def engine(base: Path, adapters: dict[str, Path]) -> Iterator[LLMEngine]:
    made = start(base, adapters)
    yield made
    made.shutdown()


def run(
    engine: LLMEngine, prompts: list[list[int]], names: list[Any], params: SamplingParams = PARAMS
) -> list[tuple[Any, Any]]:
    """Tokens and log-probabilities of each request, or its error."""
    number = next(RUNS)
    for index, (token_ids, name) in enumerate(zip(prompts, names, strict=True)):
        engine.add_request(f"{number}-{index}", {"prompt_token_ids": token_ids}, params, lora_request=name)
    found: dict[str, tuple[Any, Any]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if output.finished:
                (choice,) = output.outputs
                scores = [next(iter(item.values())).logprob for item in choice.logprobs or []]
                found[output.request_id] = (choice.error, None) if choice.error else (choice.token_ids, scores)
    return [found[f"{number}-{index}"] for index in range(len(prompts))]


def alone(engine: LLMEngine, params: SamplingParams = PARAMS) -> list[tuple[Any, Any]]:
    results = []
    for token_ids, name in zip(PROMPTS, NAMES, strict=True):
        engine.reset_prefix_cache()
        results += run(engine, [token_ids], [name], params)
    engine.reset_prefix_cache()
    return results


@pytest.mark.parametrize("name", ["one", "two"])
def test_adapter_gives_merged_model(
    base: Path, engine: LLMEngine, tmp_path: Path, name: str, adapters: dict[str, Path]
) -> None:
    matrices = (
        random_matrices(base, 1)
        if name == "one"
        else random_matrices(base, 2, rank=7, modules=("k_proj", "up_proj", "o_proj"))
    )
    merged = build(write_merged(tmp_path / "merged", base, matrices))
    wanted = run(merged, PROMPTS, [None] * 4)
    merged.shutdown()
    found = run(engine, PROMPTS, [name] * 4)
    plain = run(engine, PROMPTS, [None] * 4)
    for (tokens, scores), (own_tokens, own_scores), (base_tokens, _) in zip(wanted, found, plain, strict=True):
        assert tokens == own_tokens != base_tokens
        np.testing.assert_allclose(own_scores, scores, atol=2e-4)


def test_scale_and_rank_follow_patterns_and_rslora(base: Path, tmp_path: Path) -> None:
    matrices = random_matrices(base, 5, rank=4, modules=("o_proj",))
    name = next(iter(matrices))
    other = write_peft(
        tmp_path / "other", matrices, r=9, rank_pattern={"o_proj": 4}, alpha_pattern={"self_attn.o_proj": 6},
        use_rslora=True,
    )  # fmt: skip
    same = write_peft(tmp_path / "same", {key: (a, b) for key, (a, b) in matrices.items()}, lora_alpha=12)
    engine = start(base, {"other": other, "same": same})
    found = run(engine, [PROMPTS[1]] * 2, ["other", "same"])  # 6 / sqrt(4) = 12 / 4
    engine.shutdown()
    assert found[0] == found[1]
    assert name.endswith("o_proj.weight")


def test_gguf_adapter_gives_bits_of_peft_adapter(base: Path, tmp_path: Path) -> None:
    matrices = random_matrices(base, 3)
    paths = {
        "peft": write_peft(tmp_path / "peft", matrices),
        "gguf": write_gguf(tmp_path / "adapter.gguf", matrices, head_size=8),
    }
    engine = start(base, paths)
    found = run(engine, [PROMPTS[1]] * 2, ["peft", "gguf"])
    engine.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}, {"num_threads": 2}],
    ids=["fp32", "bf16", "int8", "threads"],
)
def test_requests_of_several_adapters_get_bits_of_each_alone(
    base: Path, adapters: dict[str, Path], options: dict[str, Any]
) -> None:
    engine = start(base, adapters, **options)
    wanted = alone(engine)
    assert run(engine, PROMPTS, NAMES) == wanted
    assert run(engine, PROMPTS, NAMES) == wanted, "with cached prefixes"
    engine.shutdown()
    plain = build(base, block_size=16, batch_invariant=True, **options)
    assert run(plain, [PROMPTS[1]], [None]) == [wanted[1]], "a base request's bits are those of an engine without"
    plain.shutdown()


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 24}, {"num_blocks": 14}, {"max_num_seqs": 2}],
    ids=["chunks", "preemption", "queue"],
)
def test_bits_do_not_depend_on_the_schedule(engine: LLMEngine, settings: dict[str, int]) -> None:
    wanted = alone(engine)
    assert run(engine_with(engine, **settings), PROMPTS, NAMES) == wanted


def test_drafts_change_no_bits(base: Path, adapters: dict[str, Path]) -> None:
    again = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    params = dataclasses.replace(PARAMS, max_tokens=24)
    found = []
    for speculative in ("off", "suffix"):
        engine = start(base, adapters, speculative=speculative)
        found.append(run(engine, [again, again], ["one", None], params))
        engine.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_give_tokens_of_one(base: Path, adapters: dict[str, Path], engine: LLMEngine, ranks: str) -> None:
    wanted = alone(engine)
    split = start(base, adapters, **{ranks: 2})
    found = run(split, PROMPTS, NAMES)
    split.shutdown()
    for (tokens, scores), (own_tokens, own_scores) in zip(wanted, found, strict=True):
        assert tokens == own_tokens
        np.testing.assert_allclose(own_scores, scores, atol=1e-4)


# --- Adapters come and go ----------------------------------------------------------------------


def test_reload_under_the_same_name_serves_no_old_keys(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(adapters["one"], tmp_path / "copy")
    engine = start(base, {"x": copy, "two": adapters["two"]})
    old, two = run(engine, [PROMPTS[1]], ["x"]), run(engine, [PROMPTS[1]], ["two"])
    shutil.rmtree(copy)
    shutil.copytree(adapters["two"], copy)
    engine.input_processor.adapters.load("x", str(copy))
    assert run(engine, [PROMPTS[1]], ["x"]) == two != old
    engine.shutdown()


def test_unload_while_in_use_lets_the_request_end(base: Path, adapters: dict[str, Path]) -> None:
    engine = start(base, adapters)
    (wanted,) = run(engine, [PROMPTS[0]], ["one"])
    engine.reset_prefix_cache()
    engine.add_request("running", {"prompt_token_ids": PROMPTS[0]}, PARAMS, lora_request="one")
    engine.step()
    engine.input_processor.adapters.unload("one")
    with pytest.raises(RequestError, match="not loaded"):
        run(engine, [PROMPTS[0]], ["one"])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == wanted[0]  # type: ignore[union-attr]
    engine.shutdown()


def test_least_recently_used_adapters_leave_and_are_read_again(base: Path, adapters: dict[str, Path]) -> None:
    wide = start(base, adapters)
    wanted = alone(wide)
    wide.shutdown()
    engine = start(base, adapters, lora_bytes=50_000)  # "one" takes 43,008
    assert alone(engine) == wanted
    assert alone(engine) == wanted
    # So long that the first one still runs when the second one's adapter has been read.
    params = dataclasses.replace(PARAMS, max_tokens=150)
    (token_ids, scores), failed = run(engine, [PROMPTS[0], PROMPTS[2]], ["one", "two"], params)
    assert (token_ids[:12], scores[:12]) == wanted[0]
    assert "--lora-bytes" in failed[0]
    engine.shutdown()


def test_names_that_clients_load_are_bounded(base: Path, adapters: dict[str, Path]) -> None:
    engine = start(base, {"one": adapters["one"]}, max_loaded_loras=2)
    known, path = engine.input_processor.adapters, str(adapters["two"])
    for name in ("a", "b", "a", "one"):  # one that is known is replaced
        known.load(name, path)
    for name in ("c", "d"):
        with pytest.raises(RequestError, match=r"3 adapters are loaded, and 2 may be .* --max-loaded-loras"):
            known.load(name, path)
    assert known.names == ("one", "a", "b")
    known.unload("a")
    known.load("c", path)
    engine.shutdown()


def test_names_of_a_programs_own_calls_are_its_own_affair(base: Path, adapters: dict[str, Path]) -> None:
    engine = start(base, {}, enable_lora=True, max_loaded_loras=1)
    for number in range(3):
        engine.input_processor.adapters.choose(LoRARequest(str(number), str(adapters["two"])), [1], ())
    assert len(engine.input_processor.adapters.names) == 3
    engine.shutdown()


def test_thousand_adapters_take_no_memory_before_they_are_used(base: Path, adapters: dict[str, Path]) -> None:
    engine = build(base, enable_lora=True, block_size=16)
    for number in range(1000):
        engine.input_processor.adapters.load(f"adapter {number}", str(adapters["one"]))
    first, last = run(engine, [PROMPTS[0]] * 2, ["adapter 0", "adapter 999"])
    assert first == last
    engine.shutdown()


def test_other_requests_go_on_while_an_adapter_is_read(
    base: Path, adapters: dict[str, Path], engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = alone(engine)
    may_read, pack = threading.Event(), adapter_pool.pack_adapter

    def pack_late(*values: Any, **options: Any) -> adapter_pool.PackedAdapter:
        assert may_read.wait(60)
        return pack(*values, **options)

    monkeypatch.setattr(adapter_pool, "pack_adapter", pack_late)
    late = start(base, adapters)
    for index, name in ((0, "one"), (1, None)):
        late.add_request(str(index), {"prompt_token_ids": PROMPTS[index]}, PARAMS, lora_request=name)
    outputs: dict[str, RequestOutput] = {}
    while "1" not in outputs or not outputs["1"].finished:
        outputs |= {output.request_id: output for output in late.step()}  # type: ignore[misc]
    assert "0" not in outputs, "it has no token before its adapter is there"
    may_read.set()
    while late.has_unfinished_requests():
        outputs |= {output.request_id: output for output in late.step()}  # type: ignore[misc]
    assert [outputs[str(index)].outputs[0].token_ids for index in range(2)] == [item[0] for item in wanted[:2]]
    late.shutdown()


def test_file_that_changed_after_loading_ends_its_request_alone(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(adapters["one"], tmp_path / "copy")
    engine = start(base, {"x": copy})
    wanted = run(engine, [PROMPTS[1]], [None])
    write_peft(copy, random_matrices(base, 9))
    engine.reset_prefix_cache()
    failed, other = run(engine, PROMPTS[:2], ["x", None])
    assert "load it again" in failed[0]
    assert [other] == wanted
    engine.shutdown()


def test_beams_and_embeddings_are_those_of_the_merged_model(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    prompts = [{"prompt_token_ids": PROMPTS[0]}, {"prompt_token_ids": PROMPTS[1]}]
    params, one = (
        BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True),
        LoRARequest("one", str(adapters["one"])),
    )
    merged = LLM(str(write_merged(tmp_path / "merged", base, random_matrices(base, 1))), device="cpu", dtype="float32")
    beams, vectors = merged.beam_search(prompts, params), merged.encode(prompts)
    llm = LLM(str(base), device="cpu", dtype="float32", enable_lora=True)
    for wanted, found, plain in zip(
        beams, llm.beam_search(prompts, params, lora_request=one), llm.beam_search(prompts, params), strict=True
    ):
        tokens = [[beam.token_ids for beam in output.sequences] for output in (wanted, found, plain)]
        assert tokens[0] == tokens[1] != tokens[2]
    for vector, own in zip(vectors, llm.encode(prompts, lora_request=[one, one]), strict=True):
        np.testing.assert_allclose(own.outputs.embedding, vector.outputs.embedding, atol=1e-4)
    with pytest.raises(RequestError, match="enable-lora"):
        merged.encode(prompts, lora_request=one)


# --- Activated adapters ------------------------------------------------------------------------


def test_activated_adapter_computes_from_its_tokens_on_and_shares_the_base_s_prefix(base: Path, tmp_path: Path) -> None:
    matrices = random_matrices(base, 1)
    paths = {
        "activated": write_peft(tmp_path / "a", matrices, alora_invocation_tokens=[7, 8]),
        "whole": write_peft(tmp_path / "w", matrices),
    }
    engine = start(base, paths)
    before = [token_id if token_id != 7 else 9 for token_id in prompt(1, 40)]
    token_ids = [*before, 7, 8, 11, 12]
    (without,) = run(engine, [before], ["activated"])
    assert [without] == run(engine, [before], [None]), "without its tokens it is the base"
    engine.reset_prefix_cache()
    (cold,) = run(engine, [token_ids], ["activated"])
    engine.reset_prefix_cache()
    run(engine, [before], [None])
    engine.add_request("warm", {"prompt_token_ids": token_ids}, PARAMS, lora_request="activated")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    warm = outputs[-1]
    assert isinstance(warm, RequestOutput)
    assert warm.num_cached_tokens == 32, "the blocks before the activation are the base's"
    assert warm.outputs[0].token_ids == cold[0]
    assert cold[0] not in (run(engine, [token_ids], [None])[0][0], run(engine, [token_ids], ["whole"])[0][0])
    engine.shutdown()


# --- Bad input ---------------------------------------------------------------------------------


def refused(engine: LLMEngine, path: Path, name: str = "bad") -> QuireError:
    with pytest.raises(QuireError) as caught:
        engine.input_processor.adapters.load(name, str(path))
    assert name not in engine.input_processor.adapters.names
    return caught.value


def test_adapter_of_another_shape_or_module_is_refused_by_name(base: Path, engine: LLMEngine, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    a, b = random_matrices(base, 1)[name]
    error = refused(engine, write_peft(tmp_path / "shape", {name: (a[:, :32], b)}))
    assert isinstance(error, ModelFileError)
    assert "q_proj" in error.message
    assert "[64, 64]" in error.message
    error = refused(engine, write_peft(tmp_path / "module", {name.replace("q_proj", "r_proj"): (a, b)}))
    assert "no module model.layers.0.self_attn.r_proj" in error.message
    error = refused(engine, write_peft(tmp_path / "layer", {name.replace("0", "77"): (a, b)}))
    assert "layers.77" in error.message
    for module in ("lm_head", "model.embed_tokens"):
        error = refused(
            engine, write_peft(tmp_path / module, {f"{module}.weight": (a, np.zeros((300, 4), np.float32))})
        )
        assert isinstance(error, UnsupportedModelError)
        assert module in error.message


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"r": 0}, "r=0"),
        ({"r": 1000}, "ranks from 1 to 256"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": 1e308}, "lora_alpha"),
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"r": 3}, "no pair of rank 3"),
        ({"alora_invocation_tokens": [299, 300]}, "invocation token 300"),
        ({"rank_pattern": {"(?=.+)+$x": 4}}, "rank_pattern"),
    ],
)
def test_wrong_config_is_refused(
    base: Path, engine: LLMEngine, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    assert told in refused(engine, write_peft(tmp_path / "bad", random_matrices(base, 1), **changes)).message


def test_missing_and_cut_files_are_refused(base: Path, engine: LLMEngine, tmp_path: Path) -> None:
    matrices = random_matrices(base, 1)
    assert "no such adapter" in refused(engine, tmp_path / "nowhere").message
    cut = write_peft(tmp_path / "cut", matrices)
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "truncated" in refused(engine, cut).message
    whole = write_gguf(tmp_path / "adapter.gguf", matrices, 8)
    whole.write_bytes(whole.read_bytes()[:5000])
    assert isinstance(refused(engine, whole), ModelFileError)
    other = write_gguf(tmp_path / "other.gguf", matrices, 8, **{"adapter.type": "other"})
    assert "not a LoRA adapter" in refused(engine, other).message
    texts = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
    for key in ("general.architecture", "split.count", "adapter.lora.alpha"):
        values = {name: (STRING, string(text)) for name, text in texts.items()}
        values |= {key: (ARRAY, array(UINT32, 1, struct.pack("<I", 7)))}
        content = gguf_bytes(tuple(key_value(name, *value) for name, value in values.items()), (tensor_info(),), DATA)
        (tmp_path / "list.gguf").write_bytes(content)
        assert f"{key}" in refused(engine, tmp_path / "list.gguf").message
    (cut / "adapter_config.json").write_text(json.dumps({}))
    assert "peft_type" in refused(engine, cut).message


def test_wrong_options_are_refused(base: Path, adapters: dict[str, Path]) -> None:
    path = adapters["one"]
    for lora in (["one"], [f"one={path}", f"one={path}"], [f"={path}"]):
        with pytest.raises(ConfigError, match="lora"):
            build(base, lora=lora)
    with pytest.raises(UnsupportedModelError, match="op by op"):
        build(base, enable_lora=True, enforce_eager=True)
    engine = build(base)
    with pytest.raises(RequestError, match="enable-lora"):
        run(engine, [PROMPTS[0]], [LoRARequest("x", str(path))])
    engine.shutdown()


def test_lora_request_reads_files_that_changed(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    engine = build(base, enable_lora=True, block_size=16)
    chosen = LoRARequest("x", str(shutil.copytree(adapters["one"], tmp_path / "x")))
    one, two = run(engine, [PROMPTS[1]], [chosen]), LoRARequest("two", str(adapters["two"]))
    shutil.rmtree(tmp_path / "x")
    shutil.copytree(adapters["two"], tmp_path / "x")
    assert run(engine, [PROMPTS[1]], [chosen]) == run(engine, [PROMPTS[1]], [two]) != one
    engine.shutdown()


def test_lora_request_reads_files_that_changed_in_place(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    engine = build(base, enable_lora=True, block_size=16)
    chosen = LoRARequest("x", str(shutil.copytree(adapters["one"], tmp_path / "x")))
    one, path = run(engine, [PROMPTS[1]], [chosen]), tmp_path / "x" / "adapter_model.safetensors"
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        file.write(bytes(status.st_size - status.st_size // 2))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run(engine, [PROMPTS[1]], [chosen]) != one
    engine.shutdown()
