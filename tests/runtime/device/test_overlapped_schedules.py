"""Random schedules on a device plan with two steps in flight: each request gets what it gets alone, step by step.

On the CPU a launch computes at once, but its tokens are handed out only by `collect`, after the next step was laid out:
the same order of knowledge as on a GPU.
"""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

from quire.engine.llm_engine import LLMEngine
from quire.engine.output_processor import Output
from quire.events import EventKind
from quire.runtime.batch import StepLayout
from quire.runtime.device import ops
from quire.runtime.device.runner import DeviceRunner
from quire.sampling_params import SamplingParams
from tests.test_random_schedules import Job, check, random_engine, random_job, run
from tests.tiny_engine import build, engine_with, write_tiny_llama

MAX_MODEL_LEN = 96
NUM_BLOCKS = 112


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    path = write_tiny_llama(tmp_path_factory.mktemp("model"))
    return build(path, block_size=16, num_blocks_override=NUM_BLOCKS, gpu_kernels="reference", speculative="off")


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make bits independent of the number of rows: summed in fp64, then rounded."""
    monkeypatch.setattr(ops, "product", lambda x, weight: (x.double() @ weight.t().double()).float())


class Watch:
    """Counts the steps of a runner by their kind; `is_off`: all are synchronous."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[str] = Counter()
        self.is_off = False
        needs_host = DeviceRunner._needs_host

        def watched(runner: DeviceRunner, layout: StepLayout, *args: Any) -> bool:
            if self.is_off:
                return True
            num_unknown = sum(
                state.num_tokens < item.num_computed_tokens + item.num_tokens for item, state in layout.computed
            )
            found = needs_host(runner, layout, *args)
            self.seen["synchronous" if found else "asynchronous"] += 1
            self.seen["unknown" if not found else "settled"] += num_unknown
            return found

        monkeypatch.setattr(DeviceRunner, "_needs_host", watched)


def plain_params(rng: random.Random) -> SamplingParams:
    """Parameters of a request that the device can sample, at least after some tokens."""
    chosen: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(1000),
        "max_tokens": rng.choice([None, 1, 2, 5, 9, 20, 40]),
        "ignore_eos": rng.random() < 0.5,
    }
    optional: dict[str, Any] = {
        "n": 2,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
        "min_tokens": 4,
        "stop_token_ids": rng.sample(range(300), 25),
        "stop": ["a", "hi", "}"],
    }
    for name in rng.sample(list(optional), rng.randrange(4)):
        chosen[name] = optional[name]
    chosen["min_tokens"] = min(chosen.get("min_tokens", 0), chosen["max_tokens"] or 4)
    chosen["temperature"] = max(chosen["temperature"], 0.5 if chosen.get("n") else 0.0)
    return SamplingParams(**chosen)


def some_job(rng: random.Random, share_of_plain: float) -> Job:
    job = random_job(rng)
    return dataclasses.replace(job, params=plain_params(rng)) if rng.random() < share_of_plain else job


def test_every_request_gets_what_it_gets_alone(base: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, seen = Watch(monkeypatch), Counter[str]()
    plain = engine_with(base, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False, policy="priority")
    for seed in range(24):
        rng = random.Random(seed)
        engine = random_engine(rng, base, seen)
        jobs = [some_job(rng, (0.5, 0.9, 1.0)[seed % 3]) for _ in range(rng.randrange(2, 12))]
        watch.is_off = True
        forget(plain)
        all_alone = [run(plain, [dataclasses.replace(job, arrival_step=0, abort_step=None)])[0] for job in jobs]
        watch.is_off = False
        forget(engine)
        outputs = run(engine, jobs, all_alone if seed % 2 else None, rng)
        for job, found, alone in zip(jobs, outputs, all_alone, strict=True):
            check_tokens(found, alone, (seed, job))
            seen.update(item.finish_reason or "" for item in getattr(found.outputs, "__iter__", list)())
        seen["preempted"] += bool(engine.events.of(EventKind.PREEMPT))
        seen["copied"] += bool(engine.events.of(EventKind.COPY))
    assert min(watch.seen[name] for name in ("synchronous", "asynchronous", "unknown", "settled")) > 100, watch.seen
    names = ("stop", "length", "abort", "error", "preempted")
    assert min(seen[name] for name in names) >= 3, seen


def check_tokens(found: Output, alone: Output, told: object) -> None:
    try:
        check(found, alone)
    except AssertionError as error:
        raise AssertionError(told) from error


def forget(engine: LLMEngine) -> None:
    """Make the executor forget the requests of the engine that had it before."""
    engine.scheduler._planner.executor_view.forget_all()
