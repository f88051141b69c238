"""Compare the tokens of a request that the real engine runs alone with those of the same request run in other ways.

Batches, chunks, preemptions, cached prefixes and forks must not change a token (tiny random Llama).
Run as a plan, the logprobs must be equal to the last bit too, in every format of weights and KV cache, on one thread
and on two.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from quire import _native
from quire.engine.llm_engine import LLMEngine
from quire.events import EventKind
from quire.sampling_params import SamplingParams
from tests.scheduler.integrity import check_integrity
from tests.tiny_engine import build, engine_with, prompt, write_tiny_llama

TILE_ISAS = [isa for isa in ("amx_emulated", "amx") if _native.isa_supported(isa)]
RUNS = itertools.count()
"""All engines here share one executor, which must never see a request id twice."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module", params=["plan", "eager"])
def base(request: pytest.FixtureRequest, directory: Path) -> LLMEngine:
    """An engine in fp32."""
    is_plan = request.param == "plan"
    engine = build(directory, block_size=16 if is_plan else 8, enforce_eager=not is_plan)
    assert engine.config.uses_plan == is_plan
    return engine


def blocks(engine: LLMEngine, num_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // engine.config.scheduler.block_size)


def tokens_of(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, *, every: int = 1) -> list[Any]:
    """All tokens of all completions; one prompt joins every `every` steps; blocks are checked after each step.

    With logprobs, if `params` ask for them: then each completion is its tokens and per token the likeliest ones.
    """
    run = next(RUNS)
    waiting = list(enumerate(prompts))
    found: dict[str, list[list[int]]] = {}
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and num_steps % every == 0:
            index, token_ids = waiting.pop(0)
            engine.add_request(f"{run}-{index}", {"prompt_token_ids": token_ids}, params)
        for output in engine.step():
            if output.finished:
                assert not engine.errored, engine.dead_error
                found[output.request_id] = [
                    completion.token_ids if params.logprobs is None else (completion.token_ids, completion.logprobs)
                    for completion in output.outputs
                ]
        check_integrity(engine.scheduler)
        num_steps += 1
    return [found[f"{run}-{index}"] for index in range(len(prompts))]


LENGTHS = (1, 3, 8, 9, 40, 77)
PROMPTS = [prompt(number, length) for number, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("is_crowded", [False, True])
def test_forked_equals_separate_runs(base: LLMEngine, is_crowded: bool) -> None:
    num_blocks = 1 + 2 * blocks(base, LENGTHS[4] + 12) if is_crowded else 96
    engine = engine_with(base, num_blocks=num_blocks, max_num_seqs=8)
    together = tokens_of(engine, [PROMPTS[4]], dataclasses.replace(DRAWN, n=4))[0]
    separate = [
        tokens_of(engine_with(base), [PROMPTS[4]], dataclasses.replace(DRAWN, seed=7 + index))[0][0]
        for index in range(4)
    ]
    assert together == separate
    assert len({tuple(tokens) for tokens in together}) > 1


# --- Formats of a plan: equal to the last bit ---------------------------------------------------

FORMATS: dict[str, dict[str, Any]] = {
    "f32, KV f32": {"dtype": "float32"},
    "f16, KV f16": {"dtype": "float16"},
    "bf16, KV bf16": {"dtype": "bfloat16"},
    "bf16, KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8, KV bf16": {"dtype": "bfloat16", "quantization": "int8"},
    "int8, KV int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4, KV bf16": {"dtype": "bfloat16", "quantization": "int4"},
    "int4, KV int8": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
    "eager": {"dtype": "float32", "enforce_eager": True, "block_size": 8},
}
Alone = tuple[LLMEngine, LLMEngine, list[tuple[SamplingParams, list[Any]]]]


@pytest.fixture(scope="module", params=FORMATS)
def alone(request: pytest.FixtureRequest, directory: Path) -> Alone:
    """Engines on one thread and on two, and what each prompt gives alone, whole, on one thread: per parameters, tokens
    and, of a plan, logprobs."""
    options = {"block_size": 16, "batch_invariant": True, **FORMATS[request.param]}
    engines = [build(directory, num_threads=n, **options) for n in (1, 2)]
    assert [engine.config.hardware.num_threads for engine in engines] == [1, 2]
    is_plan = engines[0].config.uses_plan
    assert is_plan == ("enforce_eager" not in options)
    engine = engine_with(engines[0], enable_prefix_caching=False)
    wanted = [dataclasses.replace(params, logprobs=3 if is_plan else None) for params in (GREEDY, DRAWN)]
    expected = [(params, [tokens_of(engine, [p], params)[0] for p in PROMPTS]) for params in wanted]
    assert len({str(found) for found in expected[0][1]}) == len(PROMPTS), "the model tells the prompts apart"
    return engines[0], engines[1], expected


def test_requests_have_the_tokens_and_bits_they_have_alone(alone: Alone) -> None:
    """They run in batches that requests join and leave, in chunks, with cached prefixes and after preemption."""
    single, planned, all_expected = alone
    settings: list[tuple[LLMEngine, dict[str, Any], int]] = [
        (single, {"max_num_batched_tokens": 48}, 2),
        (planned, {"max_num_batched_tokens": 48}, 1),
        (planned, {"max_num_batched_tokens": 7, "max_num_seqs": 7}, 1),
        (planned, {"max_num_batched_tokens": 17}, 5),
    ]
    for params, expected in all_expected:
        for base, changes, every in settings:
            engine = engine_with(base, **{"enable_prefix_caching": False, **changes})
            assert tokens_of(engine, PROMPTS, params, every=every) == expected, (changes, every)
        cached = engine_with(planned, enable_prefix_caching=True)
        for _ in range(2):
            assert tokens_of(cached, PROMPTS, params) == expected
        # Room for the prompts of the four longest, but not for their answers.
        num_blocks = 1 + sum(blocks(planned, length) for length in LENGTHS[-4:])
        crowded = engine_with(planned, enable_prefix_caching=False, num_blocks=num_blocks)
        assert tokens_of(crowded, PROMPTS[::-1], params) == expected[::-1]
        assert crowded.events.of(EventKind.PREEMPT)


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 2, "mirostat_tau": 3.0},
        {"dry_multiplier": 2.0, "dry_allowed_length": 0},
        {"typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.02, "dynatemp_range": 0.5},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_samplers_with_state_give_the_tokens_they_give_alone(base: LLMEngine, fields: dict[str, Any]) -> None:
    """In batches, in chunks, in steps of one and several tokens, and after preemption, which mirostat's mu survives."""
    params = dataclasses.replace(DRAWN, top_p=1.0, **fields)
    alone = engine_with(base, enable_prefix_caching=False)
    expected = [tokens_of(alone, [each], params)[0] for each in PROMPTS]
    assert expected != [tokens_of(alone, [each], dataclasses.replace(DRAWN, top_p=1.0))[0] for each in PROMPTS]
    num_blocks = 1 + sum(blocks(base, length) for length in LENGTHS[-4:])
    for changes in ({"max_num_batched_tokens": 17}, {"multi_step_decode": 1}, {"num_blocks": num_blocks}):
        engine = engine_with(base, **{"enable_prefix_caching": False, **changes})
        assert tokens_of(engine, PROMPTS[::-1], params) == expected[::-1], changes
        assert bool(engine.events.of(EventKind.PREEMPT)) == ("num_blocks" in changes)


def test_likeliest_token_without_its_logprob_is_the_same(alone: Alone) -> None:
    """The head compares logits without writing them in steps of greedy requests alone."""
    params, expected = alone[2][0]
    tokens = [[item if params.logprobs is None else item[0] for item in completions] for completions in expected]
    assert tokens_of(engine_with(alone[1], max_num_batched_tokens=48), PROMPTS, GREEDY) == tokens


@pytest.mark.skipif(not TILE_ISAS, reason="AMX's tiles, and their emulation, need AVX-512")
@pytest.mark.parametrize("name", ["bf16, KV int8", "int8, KV bf16"])
def test_without_batch_invariance_a_schedule_has_its_bits_and_is_as_exact(directory: Path, name: str) -> None:
    """On AMX, where steps of many tokens have another arithmetic."""
    params = dataclasses.replace(GREEDY, max_tokens=1, logprobs=20)
    options = {"block_size": 16, "max_num_batched_tokens": 48, "enable_prefix_caching": False}
    before = _native.isa()
    _native.set_isa(TILE_ISAS[-1])
    try:
        varying, invariant = (build(directory, batch_invariant=on, **options, **FORMATS[name]) for on in (False, True))
        assert (varying.config.batch_invariant, invariant.config.batch_invariant) == (False, True)
        found = [tokens_of(engine, PROMPTS, params) for engine in (varying, varying, invariant)]
        exact = tokens_of(build(directory, **options), PROMPTS, params)
    finally:
        _native.set_isa(before)
    assert found[0] == found[1] != found[2]
    assert mean_error(found[0], exact) < 1.2 * mean_error(found[2], exact)


def mean_error(found: list[Any], exact: list[Any]) -> float:
    """Return the mean error of the log-probabilities of the first token's likeliest ids."""
    errors = []
    for completions, others in zip(found, exact, strict=True):
        (_, (one,)), (_, (other,)) = completions[0], others[0]
        errors += [abs(one[key].logprob - other[key].logprob) for key in one.keys() & other.keys()]
    return sum(errors) / len(errors)
