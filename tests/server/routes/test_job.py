import pytest

from quire.engine.process.messages import RequestUpdate
from quire.outputs import RequestMetrics
from quire.server.protocol.answers import Timings
from quire.server.routes.job import timings


def update(first_token_s: float | None, last_token_s: float | None, scheduled_s: float | None = 11.0) -> RequestUpdate:
    metrics = RequestMetrics(10.0, scheduled_s, first_token_s, last_token_s, last_token_s)
    return RequestUpdate("r", finished=True, num_cached_tokens=4, metrics=metrics)


def test_prompt_time_ends_with_the_first_token() -> None:
    found = timings(24, 8, update(11.5, 13.5))
    assert found == pytest.approx({
        "cache_n": 4, "prompt_n": 20, "prompt_ms": 500, "prompt_per_token_ms": 25, "prompt_per_second": 40,
        "predicted_n": 8, "predicted_ms": 2000, "predicted_per_token_ms": 250, "predicted_per_second": 4,
    })  # fmt: skip
    assert Timings.model_validate(found)


def test_times_of_zero_give_speeds_of_zero() -> None:
    found = timings(4, 1, update(11.0, 11.0))
    assert found is not None
    assert (found["prompt_per_second"], found["predicted_per_second"]) == (0, 0)
    assert found["prompt_per_token_ms"] == 0


def test_timings_need_a_token() -> None:
    assert timings(4, 0, update(None, None)) is None
    assert timings(4, 0, RequestUpdate("r")) is None
