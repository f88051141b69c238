"""EOS, then stop tokens, then length."""

from typing import Any

import pytest

from quire.sampling_params import SamplingParams
from quire.types import RequestStatus, find_stop
from tests.scheduler.builders import Driver, make_config, make_request

STOP, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH
EOS, STOP_ID = 7, 8


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([1], {}, None),
        ([EOS], {}, (STOP, None)),
        ([EOS], {"ignore_eos": True}, None),
        ([STOP_ID], {}, (STOP, STOP_ID)),
        ([EOS], {"stop_token_ids": [EOS]}, (STOP, None)),
        ([EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, (STOP, EOS)),
        ([1, EOS], {"min_tokens": 3}, None),
        ([1, STOP_ID], {"min_tokens": 3}, None),
        ([1, 1, EOS], {"min_tokens": 3}, (STOP, None)),
        ([1, 1, STOP_ID], {"min_tokens": 3}, (STOP, STOP_ID)),
        ([1, 1, 1, 1], {}, (LENGTH, None)),
        ([1, 1, 1, EOS], {}, (STOP, None)),
        ([1, 1, 1, STOP_ID], {}, (STOP, STOP_ID)),
        ([1, 1, 1, EOS], {"ignore_eos": True}, (LENGTH, None)),
        ([1, 1, 1, EOS], {"min_tokens": 4}, (STOP, None)),
    ],
)
def test_first_stop_by_eos_then_stop_tokens_then_length(
    output: list[int], params: dict[str, Any], expected: tuple[RequestStatus, int | None] | None
) -> None:
    sampling = SamplingParams(**{"stop_token_ids": [STOP_ID], **params})
    for num_before in range(len(output)):  # however many tokens a step yields, the first stop is the same
        stop = find_stop(sampling, {EOS}, 4, num_before, [*output[num_before:], EOS, STOP_ID])
        if expected is None:
            assert stop is None or stop.num_tokens > len(output) - num_before
        else:
            assert stop == (len(output) - num_before, *expected)


def test_a_scheduled_request_stops_by_these_rules() -> None:
    script = [1, EOS, 1, STOP_ID, 1]
    for params, num_tokens, reason in (
        ({}, 2, None),
        ({"ignore_eos": True}, 4, STOP_ID),
        ({"min_tokens": 3}, 4, STOP_ID),
        ({"min_tokens": 5}, 5, None),
    ):
        driver = Driver(make_config(), next_token=lambda _, tokens: script[len(tokens) - 3])
        params = {"stop_token_ids": [STOP_ID], **params}
        request = make_request("a", 3, 5, params=params, eos_token_ids=frozenset({EOS}))
        driver.add(request)
        driver.run()
        assert request.output_token_ids == script[:num_tokens]
        assert request.stop_reason == reason
        assert request.status is (LENGTH if num_tokens == 5 else STOP)
