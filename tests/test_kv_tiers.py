"""KV blocks on disk and in host memory, with real engines: the same tokens, computed by reading instead."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire import cache_spec
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.events import EventKind
from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ModelRegistry
from quire.sampling_params import SamplingParams
from tests.engine.builders import finals, run
from tests.tiny_engine import (
    VOCAB_SIZE,
    build,
    engine_with,
    prompt,
    transformers,
    write_tiny,
    write_tiny_hybrid,
    write_tiny_llama,
)

SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.3,
}  # fmt: skip
PROMPTS = [prompt(1, 90), prompt(1, 70) + prompt(2, 40), prompt(3, 33)]
BLOCK_SIZE = 16


def write_windows(path: Path) -> Path:
    """Full attention and windows of 32 tokens."""
    types = ["sliding_attention", "full_attention"]
    config = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=32, layer_types=types
    )
    return write_tiny(path, config)


def write_latent(path: Path) -> Path:
    """Latent attention."""
    config = transformers.DeepseekV2Config(
        **SIZES, num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=1, topk_group=1,
    )  # fmt: skip
    return write_tiny(path, config)


WRITERS = {
    "paged": write_tiny_llama, "windows": write_windows, "latent": write_latent, "hybrid": write_tiny_hybrid,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


def generate(engine: LLMEngine, prompts: list[list[int]], max_tokens: int = 6) -> list[Any]:
    """Tokens with their logprobs, and cached tokens, of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    for index, token_ids in enumerate(prompts):
        engine.add_request(str(index), token_ids, params)
    found = finals(run(engine))
    outputs = [found[str(index)] for index in range(len(prompts))]
    return [((item.outputs[0].token_ids, item.outputs[0].logprobs), item.num_cached_tokens) for item in outputs]


def one_by_one(engine: LLMEngine, prompts: list[list[int]]) -> tuple[list[Any], list[int]]:
    """Return each prompt's tokens alone, and its cached tokens; the engine then ends in an orderly way."""
    found = [generate(engine, [token_ids])[0] for token_ids in prompts]
    engine.shutdown()
    return [texts for texts, _ in found], [num_cached for _, num_cached in found]


@pytest.mark.parametrize("execution", ["plan", "eager"])
@pytest.mark.parametrize("kind", WRITERS)
def test_restarted_engine_reads_prefixes_from_disk(
    kind: str, execution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_spec, "CHECKPOINT_INTERVALS", (32, 32))  # prompts here are short
    model = WRITERS[kind](tmp_path / "model")
    options = {"block_size": BLOCK_SIZE, "enforce_eager": execution == "eager", "batch_invariant": True}
    expected, _ = one_by_one(build(model, **options), PROMPTS)
    disk = {"kv_disk": str(tmp_path / "kv")}
    first, num_first = one_by_one(build(model, **options, **disk), PROMPTS)
    second, num_second = one_by_one(build(model, **options, **disk), PROMPTS)
    for found in (first, second):
        if kind == "latent" or execution == "eager":  # last bits depend on the chunks
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            logprobs = [[item.logprob for _, at in texts for each in at for item in each.values()]
                        for texts in (found, expected)]  # fmt: skip
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4 if execution == "eager" else 1e-2)
        else:
            assert found == expected
    # The second prompt finds part of the first: that much is on the device.
    assert num_first[0] == num_first[2] == 0
    interval = 32 if kind == "hybrid" else BLOCK_SIZE
    assert num_second == [(len(token_ids) - 1) // interval * interval for token_ids in PROMPTS]


@pytest.mark.parametrize("kind", WRITERS)
def test_session_goes_on_after_a_restart(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_spec, "CHECKPOINT_INTERVALS", (32, 32))
    model, unit = WRITERS[kind](tmp_path / "model"), 32 if kind == "hybrid" else BLOCK_SIZE
    history: list[int] = []
    for life in range(3):
        engine = build(model, block_size=BLOCK_SIZE, kv_disk=str(tmp_path / "kv"))
        for turn in range(3):
            question = prompt(10 * life + turn, 90 if not history else 15)
            (((answer, _), num_cached),) = generate(engine, [history + question], max_tokens=20)
            # The last token of an answer is sampled and never computed.
            assert num_cached >= max(0, len(history) - 1) // unit * unit
            history += [*question, *answer]
        engine.shutdown()


def test_blocks_that_leave_the_memory_are_read_back(llama: Path, tmp_path: Path) -> None:
    # 14 usable blocks: a prompt and its answer take seven.
    options = {"block_size": BLOCK_SIZE, "num_blocks_override": 15, "kv_disk": tmp_path / "kv"}
    engine = build(llama, **options | {"kv_disk": str(options["kv_disk"])})
    prompts = [prompt(number, 97) for number in range(4)]
    first = [generate(engine, [token_ids])[0] for token_ids in prompts]
    again = [generate(engine, [token_ids])[0] for token_ids in prompts]
    assert [texts for texts, _ in again] == [texts for texts, _ in first]
    assert [num_cached for _, num_cached in again] == [96] * 4
    disk = engine.events.of(EventKind.DISK)
    assert sum(event.data["num_bytes_read"] for event in disk) > 0
    fetched = engine.events.of(EventKind.FETCHED)
    assert sum(event.data["num_disk_tokens"] for event in fetched) >= 2 * 96
    assert engine.reset_prefix_cache()


GENERATOR = """
import json, sys
from quire import LLM, SamplingParams

model, prompts, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
llm = LLM(model, **options)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
while True:
    for number, token_ids in enumerate(prompts):
        llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
        print(number, flush=True)
"""
"""A program of a user's: it imports no Transformers, which takes as long as its own computation."""


def test_engines_killed_while_they_write_change_no_token(llama: Path, tmp_path: Path) -> None:
    """Each request takes the memory of an earlier one, which is written meanwhile."""
    rng, prompts = random.Random(9), [prompt(number, 97) for number in range(40)]
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 16, "block_size": BLOCK_SIZE}
    options |= {"num_blocks_override": 15, "kv_disk": str(tmp_path / "kv")}
    command = [sys.executable, "-c", GENERATOR, str(llama), json.dumps(prompts), json.dumps(options)]
    for _ in range(4):
        with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE) as engine:
            assert engine.stdout is not None
            for _ in range(rng.randrange(5, 40)):
                assert engine.stdout.readline(), "the engine ended by itself"
            engine.kill()
    expected, _ = one_by_one(build(llama, block_size=BLOCK_SIZE), prompts)
    found, num_cached = one_by_one(build(llama, block_size=BLOCK_SIZE, kv_disk=str(tmp_path / "kv")), prompts)
    assert found == expected
    assert sum(count > 0 for count in num_cached) >= 3


def test_damaged_and_missing_files_change_no_token(llama: Path, tmp_path: Path) -> None:
    options = {"block_size": BLOCK_SIZE, "kv_disk": str(tmp_path / "kv")}
    expected, _ = one_by_one(build(llama, **options), PROMPTS)
    rng = random.Random(6)
    files = sorted((tmp_path / "kv").glob("*/*.kv"))
    assert len(files) == 10
    for _ in range(3):
        for path in rng.sample(files, 4):
            if rng.random() < 0.3:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(path.read_bytes()[: rng.randrange(3000)] if path.exists() else b"")
        found, num_cached = one_by_one(build(llama, **options), PROMPTS)
        assert found == expected
        assert sum(num_cached) <= 80 + 96 + 32


@pytest.mark.parametrize("change", ["weights", "kv_cache_dtype", "block_size", "limit"])
def test_blocks_of_another_model_are_not_found(llama: Path, tmp_path: Path, change: str) -> None:
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "kv_disk": str(tmp_path / "kv")}
    one_by_one(build(llama, **options), PROMPTS[:1])
    changed: dict[str, Any] = {"kv_cache_dtype": "int8"} if change == "kv_cache_dtype" else {}
    if change == "block_size":
        changed = {"block_size": 32}
    path = llama / "model.safetensors"
    before = path.stat()
    if change == "weights":
        os.utime(path)
    _, num_cached = one_by_one(build(llama, **options | changed), PROMPTS[:1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert num_cached == [80 if change == "limit" else 0]
    # Both models have a place in the directory.
    assert len(list((tmp_path / "kv").glob("*/model.json"))) == (1 if change == "limit" else 2)


def test_program_that_ends_without_shutdown_keeps_its_blocks(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[Callable[[], None]] = []
    monkeypatch.setattr("quire.engine.llm_engine.atexit.register", lambda *call: exits.append(partial(*call)))
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "kv_disk": str(tmp_path / "kv")}
    engine = build(llama, **options)
    generate(engine, PROMPTS[:1])
    engine._executor._worker.cache.disk._writer.shutdown()  # as the interpreter does before it calls these functions
    exits[0]()
    assert one_by_one(build(llama, **options), PROMPTS[:1])[1] == [80]


def test_model_of_another_package_is_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(LlamaForCausalLM):
        """Code that may change between two runs."""

    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": Other})
    with pytest.raises(ConfigError, match="--kv-disk needs a model whose code is Quire's own"):
        build(llama, kv_disk=str(tmp_path / "kv"))


def test_option_names_a_file(llama: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold KV blocks"):
        build(llama, kv_disk=str(llama / "config.json"))


def swapping(base: LLMEngine, **settings: Any) -> Callable[[], tuple[list[Any], int, int]]:
    def measure() -> tuple[list[Any], int, int]:
        engine = engine_with(base, **settings)
        ids = [f"{sorted(settings.items())}-{index}" for index in range(6)]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
        for index, name in enumerate(ids):
            engine.add_request(name, prompt(index, 40), params)
        found = finals(run(engine))
        assert engine.reset_prefix_cache()
        num_preempted = len(engine.events.of(EventKind.PREEMPT))
        num_host = sum(event.data["num_host_tokens"] for event in engine.events.of(EventKind.FETCHED))
        assert len(engine.scheduler.blocks.tiers.free_slots) == engine.config.scheduler.num_host_blocks
        texts = [found[name].outputs[0] for name in ids]
        return [(text.token_ids, text.logprobs) for text in texts], num_preempted, num_host

    return measure


def test_preempted_requests_get_their_blocks_back(llama: Path) -> None:
    base = build(llama, block_size=BLOCK_SIZE, preemption_mode="swap", swap_space=0.01)
    assert base.config.scheduler.num_host_blocks > 20
    roomy = swapping(base)()
    swapped = swapping(base, num_blocks=17)()
    recomputed = swapping(base, num_blocks=17, num_host_blocks=0)()
    assert roomy[0] == swapped[0] == recomputed[0]
    assert roomy[1] == 0
    assert swapped[1] > 0
    assert swapped[2] > 0
    assert recomputed[2] == 0
