"""The span that counts: it begins when all streams generate and ends with the first of them."""

import pytest

from benchmarks.sides import protocol
from benchmarks.sides.protocol import Timing


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(protocol, "time", clock)
    return clock


def feed(timing: Timing, clock: Clock, steps: list[list[int]]) -> None:
    for counts in steps:
        clock.now_s += 1.0
        timing.note(counts)


def test_prompt_processing_ends_with_the_last_first_token(clock: Clock) -> None:
    timing = Timing([[1] * 10, [2] * 20], 0)
    feed(timing, clock, [[], [1], [1, 1], [1, 1]])
    assert timing.num_to_generate == 1
    assert (timing.seconds, timing.tokens) == (3.0, 30)


def test_generation_starts_after_the_first_token_of_all(clock: Clock) -> None:
    timing = Timing([[1], [2]], 4)
    feed(timing, clock, [[1, 1], [2, 2], [3, 3], [4, 4]])
    assert (timing.seconds, timing.tokens) == (3.0, 6)


def test_tokens_before_the_last_stream_joined_do_not_count(clock: Clock) -> None:
    timing = Timing([[1], [2]], 4)
    feed(timing, clock, [[1], [2, 0], [3, 1], [4, 2], [4, 3], [4, 4]])
    assert (timing.seconds, timing.tokens) == (1.0, 2)


@pytest.mark.parametrize("steps", [[[1], [2]], [[1], [2], [3], [4, 1], [4, 2], [4, 4]]])
def test_nothing_is_measured_when_a_stream_ends_before_all_run(clock: Clock, steps: list[list[int]]) -> None:
    timing = Timing([[1], [2]], 4)
    feed(timing, clock, steps)
    assert timing.tokens == 0
