"""Rows, their names, and what is counted."""

import pytest

from quire.config import EngineOptions
from quire_workshop import bench_cases
from quire_workshop.bench_cases import BenchCase, measure
from tests.cli.command_line import FakeEngine


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
    """Return an engine whose steps take these times; the last one repeats."""
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
