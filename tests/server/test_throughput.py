import pytest

from quire.engine.process.messages import Statistics
from quire.server.throughput import DEFAULT_WAIT_S, MAX_WAIT_S, AnswerLengths, Throughput


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def after(tokens: int, busy_s: float) -> Statistics:
    return Statistics(num_computed_tokens=tokens, busy_s=busy_s)


def test_engine_without_a_step_has_no_speed() -> None:
    throughput = Throughput(Clock())
    assert throughput.tokens_per_s(Statistics()) is None
    assert throughput.wait_s(Statistics(), 10_000) == DEFAULT_WAIT_S


def test_idle_time_does_not_count() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    throughput.note(after(0, 0.0))
    clock.now_s = 1000
    assert throughput.tokens_per_s(after(500, 5.0)) == 100


def test_speed_is_that_of_the_last_half_minute() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    for second in range(100):
        clock.now_s = second
        # It becomes ten times faster after 60 s.
        throughput.note(after(second * 10 if second < 60 else 600 + (second - 60) * 100, float(second)))
    assert throughput.tokens_per_s(after(600 + 4000, 100.0)) == 100


def test_new_engine_starts_new_samples() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    throughput.note(after(10_000, 10.0))
    clock.now_s = 5
    assert throughput.tokens_per_s(after(50, 1.0)) == 50


def test_waits_are_bounded() -> None:
    throughput = Throughput(Clock())
    assert throughput.wait_s(after(1, 100.0), 10**9) == MAX_WAIT_S
    assert throughput.wait_s(after(10**9, 1.0), 1) == DEFAULT_WAIT_S


def test_speed_of_one_row_is_extrapolated_to_many() -> None:
    throughput = Throughput(Clock())
    alone = Statistics(num_computed_tokens=100, num_steps=100, busy_s=1.0)
    assert throughput.tokens_per_s(alone) == 100
    assert throughput.tokens_per_s(alone, num_seats=16) == pytest.approx(400)
    assert throughput.tokens_per_s(alone, num_seats=10_000) == throughput.tokens_per_s(alone, num_seats=64)
    full = Statistics(num_computed_tokens=1600, num_steps=100, busy_s=1.0)
    assert throughput.tokens_per_s(full, num_seats=16) == 1600


def test_used_share_follows_recent_answers() -> None:
    lengths = AnswerLengths()
    assert lengths.used_share == 1
    lengths.add(64, 64)
    assert lengths.used_share == 1
    for _ in range(200):
        lengths.add(1000, 100)
    assert lengths.used_share == pytest.approx(0.1, rel=0.02)
    for _ in range(200):
        lengths.add(0, 0)  # embeddings say nothing
    assert 0 < lengths.used_share <= 1
