"""Random schedules on a real engine: each request gets what it gets alone, to the last bit.

Requests of every kind come and go at random, in chunks of any size, in pools so small that they preempt each other,
with one token a step or several, with right and wrong drafts. Each is compared with itself alone: whole, one token a
step, without a prefix cache.
"""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import cache_spec
from quire.engine.llm_engine import LLMEngine
from quire.engine.output_processor import Output
from quire.events import EventKind
from quire.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler import pace
from quire.scheduler.request import SequenceUpdate
from quire.structured_outputs import ReasoningSpan, StructuredOutputsParams
from quire.types import SchedulerOutput, StepResult
from tests.scheduler.integrity import check_integrity
from tests.tiny_engine import (
    VOCAB_SIZE,
    build,
    engine_with,
    prompt,
    write_tiny_hybrid,
    write_tiny_llama,
    write_tiny_state_space,
)

MAX_MODEL_LEN = 96
NUM_BLOCKS = 96
IDS = itertools.count()
"""All engines here share one executor, which must never see a request id twice."""
PAIRS = list(range(VOCAB_SIZE))[-41:]
"""Tokens of two letters."""
FORMS = [
    StructuredOutputsParams(regex="[a-m]{3,12}"),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    StructuredOutputsParams(choice=["abc", "bcd", "ahai"]),
    StructuredOutputsParams(
        regex="[a-m]{3,12}", reasoning=ReasoningSpan(start="a", end="hh", is_open=False, budget=5, closing="bchh")
    ),
    StructuredOutputsParams(reasoning=ReasoningSpan(start="a", end="hh", is_open=True, budget=3)),
]


@dataclasses.dataclass(frozen=True)
class Job:
    """A request, when it comes and when it is aborted."""

    token_ids: list[int]
    params: SamplingParams | PoolingParams
    arrival_step: int
    abort_step: int | None
    priority: int


@pytest.fixture(scope="module", autouse=True)
def small_shares() -> Iterator[None]:
    """Prompts here are as long as the smallest share of a step that prompts get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "MIN_STEP_TOKENS", 3)
        yield


def random_params(rng: random.Random) -> SamplingParams | PoolingParams:
    if rng.random() < 0.1:
        return PoolingParams(pooling=rng.choice(["last", "mean"]))
    if rng.random() < 0.1:
        # Fails in the end: the token that ends the text is not allowed.
        form = StructuredOutputsParams(regex=f"([a-g][h-m]){{{rng.randrange(1, 9)}}}")
        return SamplingParams(seed=1, max_tokens=20, logprobs=1, structured_outputs=form, allowed_token_ids=PAIRS)
    is_drawn = rng.random() < 0.6
    chosen: dict[str, Any] = {
        "temperature": rng.choice([0.7, 1.0, 1.5]) if is_drawn else 0.0,
        "seed": rng.randrange(1000),
        "n": rng.choice([1, 1, 1, 2, 3]) if is_drawn else 1,
        "max_tokens": rng.choice([None, 1, 2, 5, 9, 20, 40]),
        "ignore_eos": rng.random() < 0.5,
    }
    optional: dict[str, Any] = {
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "logprobs": rng.randrange(4),
        "prompt_logprobs": rng.randrange(2),
        "min_tokens": 4,
        "stop_token_ids": rng.sample(range(VOCAB_SIZE), 25),
        "stop": ["a", "hi", "}"],
        "logit_bias": {7: 2.0, 8: -3.0},
        "bad_words": ["ah", "b"],
        "allowed_token_ids": PAIRS,
        "structured_outputs": rng.choice(FORMS),
    }
    for name in rng.sample(list(optional), rng.randrange(5)):
        chosen[name] = optional[name]
    chosen["min_tokens"] = min(chosen.get("min_tokens", 0), chosen["max_tokens"] or 4)
    return SamplingParams(**chosen)


def random_job(rng: random.Random) -> Job:
    shared = prompt(rng.randrange(2), rng.choice([0, 16, 20, 33, 64]))
    own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 1, 2, 7, 18]))]
    token_ids = (shared + own) if rng.random() < 0.95 else prompt(3, MAX_MODEL_LEN - 1)
    abort_step = rng.randrange(1, 30) if rng.random() < 0.2 else None
    return Job(token_ids, random_params(rng), rng.randrange(16), abort_step, rng.randrange(3))


def count_state_groups(engine: LLMEngine) -> int:
    return sum(group.spec.is_state for group in engine.config.scheduler.kv_cache_groups)


def fewest_blocks(engine: LLMEngine) -> list[int]:
    """Sizes of pools, of which the smallest hold one or two requests."""
    num_groups, num_states = len(engine.config.scheduler.kv_cache_groups), count_state_groups(engine)
    of_tokens = [0, 0, 0] if num_states == num_groups else [8, 10, 14]
    return [count + 3 * num_states + (count == 0) for count in of_tokens] + [NUM_BLOCKS]


def random_engine(rng: random.Random, base: LLMEngine, seen: Counter[str]) -> LLMEngine:
    engine = engine_with(
        base,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.randrange(3, 9),
        max_num_batched_tokens=rng.choice([5, 17, 32, 64]),
        num_blocks=rng.choice(fewest_blocks(base)),
        enable_prefix_caching=rng.random() < 0.7,
        max_num_partial_prefills=rng.randrange(1, 3),
        prefill_tokens_per_decode=rng.choice([None, 1, 3]),
        multi_step_decode=rng.choice([1, 2, 4, 8, 8]),
        policy="priority",
    )
    engine._executor._worker.runner.limit_s = 60  # type: ignore[attr-defined]  # so that a slow machine ends no step
    update = engine.scheduler.update

    def counting(output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        drafted = {item.request_id: len(item.draft_token_ids) for item in output.scheduled if item.draft_token_ids}
        for item in result.results:
            if item.request_id in drafted:
                seen["rejected" if len(item.token_ids) <= drafted[item.request_id] else "accepted"] += 1
        return update(output, result)

    engine.scheduler.update = counting  # type: ignore[method-assign]
    return engine


def set_drafts(engine: LLMEngine, alone: dict[str, list[int]], rng: random.Random) -> None:
    """Give some sequences drafts: right ones, wrong ones, right ones with a wrong end."""
    for name, expected in alone.items():
        request = engine.scheduler.get(name)
        if request is not None and rng.random() < 0.7:
            start = len(request.output_token_ids)
            right = expected[start : start + rng.randrange(6)]
            request.draft_token_ids = (*right, *rng.choices(range(VOCAB_SIZE), k=rng.randrange(3)))


def run(
    engine: LLMEngine, jobs: list[Job], alone: list[Output] | None = None, rng: random.Random | None = None
) -> list[Output]:
    """The last output of each job. Blocks are checked after each step, and are home at the end.

    `alone`: the outputs from which to make drafts.
    """
    ids = [f"r{next(IDS)}" for _ in jobs]
    found: dict[str, Output] = {}
    sequences: dict[str, list[int]] = {}
    for request_id, output in zip(ids, alone or (), strict=False):
        if isinstance(output, RequestOutput):
            for item in output.outputs:
                sequences[f"{request_id}/{item.index}" if item.index else request_id] = item.token_ids
    for step in itertools.count():
        if rng is not None:
            set_drafts(engine, sequences, rng)
            if rng.random() < 0.1:
                engine.end_step_early()
        for request_id, job in zip(ids, jobs, strict=True):
            if job.arrival_step == step:
                engine.add_request(request_id, {"prompt_token_ids": job.token_ids}, job.params, priority=job.priority)
            if job.abort_step == step:
                engine.abort_request(request_id)
        for output in engine.step():
            assert output.request_id not in found, "nothing comes after the end"
            if output.finished:
                found[output.request_id] = output
        assert not engine.errored, engine.dead_error
        check_integrity(engine.scheduler)
        if step > 30 and not engine.has_unfinished_requests():
            break
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.pool.num_usable
    return [found[request_id] for request_id in ids]


def check(found: Output, alone: Output) -> None:
    if isinstance(found, PoolingRequestOutput):
        assert isinstance(alone, PoolingRequestOutput)
        assert found.finish_reason == "abort" or found.outputs == alone.outputs
        return
    assert isinstance(alone, RequestOutput)
    was_aborted = any(item.finish_reason == "abort" for item in found.outputs)
    assert was_aborted or found.prompt_logprobs == alone.prompt_logprobs
    for ours, theirs in zip(found.outputs, alone.outputs, strict=True):
        check_completion(ours, theirs)


def check_completion(found: CompletionOutput, alone: CompletionOutput) -> None:
    if found.finish_reason != "abort":
        assert found == alone
        return
    num_tokens = len(found.token_ids)
    assert found.token_ids == alone.token_ids[:num_tokens]
    if found.logprobs is not None:
        assert alone.logprobs is not None
        assert found.logprobs == alone.logprobs[:num_tokens]


INT8 = {"dtype": "bfloat16", "kv_cache_dtype": "int8", "quantization": "int8"}
CASES = {
    "float32": (write_tiny_llama, {"dtype": "float32"}),
    "int8": (write_tiny_llama, INT8),
    "recurrent states beside attention, int8": (write_tiny_hybrid, INT8),
    "recurrent states alone": (write_tiny_state_space, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize(("write", "options"), CASES.values(), ids=CASES)
def test_every_request_gets_what_it_gets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], options: dict[str, Any]
) -> None:
    monkeypatch.setattr(cache_spec, "CHECKPOINT_INTERVALS", (16, 32))  # prompts here are short
    base = build(write(tmp_path), block_size=16, num_blocks_override=NUM_BLOCKS + 16, batch_invariant=True, **options)
    alone_settings = {"enable_prefix_caching": False, "multi_step_decode": 1, "policy": "priority"}
    plain = engine_with(base, max_model_len=MAX_MODEL_LEN, **alone_settings)
    seen: Counter[str] = Counter()
    for seed in range(20):
        rng = random.Random(seed)
        engine = random_engine(rng, base, seen)
        jobs = [random_job(rng) for _ in range(rng.randrange(1, 12))]
        all_alone = [run(plain, [dataclasses.replace(job, arrival_step=0, abort_step=None)])[0] for job in jobs]
        outputs = run(engine, jobs, all_alone if seed % 2 else None, rng)
        for job, found, alone in zip(jobs, outputs, all_alone, strict=True):
            try:
                check(found, alone)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {job}") from error
            seen.update(item.finish_reason or "" for item in getattr(found.outputs, "__iter__", list)())
        seen["preempted"] += bool(engine.events.of(EventKind.PREEMPT))
        steps = engine.events.of(EventKind.STEP)
        seen["iterations"] += max(event.data["num_iterations"] for event in steps) > 1
        seen["cached"] += any(event.data["num_cached_tokens"] for event in engine.events.of(EventKind.ADMIT))
        seen["copied"] += bool(engine.events.of(EventKind.COPY))
    # A request with states gets drafts only when a single token is left to compute.
    assert min(seen["accepted"], seen["rejected"]) > (10 if count_state_groups(base) else 25), seen
    names = ("stop", "length", "abort", "error", "preempted", "iterations", "cached")
    assert min(seen[name] for name in names) >= 3, seen
