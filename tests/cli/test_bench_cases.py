"""Rows, their names, and what is counted."""

import random

import pytest

from quire.cli import bench_cases
from quire.cli.bench_cases import BenchCase, Measurement, measure, random_prompts
from quire.config import EngineOptions
from tests.cli.command_line import FakeEngine


def test_names_and_order() -> None:
    cases = bench_cases.bench_cases((512, 0), (128,), (1, 32), (0, 1024))
    assert [case.name for case in cases] == ["pp512", "tg128", "tg128@32", "tg128+d1024", "tg128@32+d1024"]
    assert [case.len_needed for case in cases] == [513, 129, 129, 1152, 1152]
    assert bench_cases.bench_cases((0,), (0,), (1,), (0,)) == []


def test_prompts_are_random_ordinary_tokens() -> None:
    prompts = random_prompts(BenchCase(50, 0, 3), 10, frozenset({0, 9}), random.Random(1))
    assert [len(prompt) for prompt in prompts] == [50, 50, 50]
    assert prompts[0] != prompts[1]
    assert {token for prompt in prompts for token in prompt} == set(range(1, 9))


class Clock:
    """Time passes only in the engine's steps."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bench_cases, "time", clock)
    return clock


def engine_with(clock: Clock, *durations_s: float) -> FakeEngine:
    """An engine whose steps take these times; the last one repeats."""
    engine = FakeEngine(EngineOptions())
    left = list(durations_s)

    def pass_time() -> None:
        clock.now += left.pop(0) if len(left) > 1 else left[0]

    engine.on_step = pass_time
    return engine


def test_prompt_processing_counts_prompt_tokens_over_the_whole_time(clock: Clock) -> None:
    engine = engine_with(clock, 0.5)
    assert measure(engine, BenchCase(100, 0), [[1] * 100]) == pytest.approx(200)
    assert engine.params[0].max_tokens == 1


def test_generation_counts_tokens_after_the_first(clock: Clock) -> None:
    engine = engine_with(clock, 9.0, 0.1)
    rate = measure(engine, BenchCase(1, 11, 4), [[1]] * 4)
    assert rate == pytest.approx(4 * 10 / (10 * 0.1))
    assert all(params.ignore_eos and params.is_greedy and not params.detokenize for params in engine.params)
    assert not engine.has_unfinished_requests()


def test_mean_and_deviation_of_repetitions() -> None:
    ours = Measurement(BenchCase(1, 8), [10, 12])
    assert (ours.mean, ours.deviation) == (11, pytest.approx(2**0.5))
    assert Measurement(BenchCase(1, 1), [3.0]).deviation == 0
