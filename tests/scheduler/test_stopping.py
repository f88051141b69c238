"""EOS, then stop tokens, then length."""

from typing import Any

import pytest

from quire.scheduler.stopping import check_stop
from quire.types import RequestStatus
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
def test_stop_rules(output: list[int], params: dict[str, Any], expected: tuple[RequestStatus, int | None]) -> None:
    params = {"stop_token_ids": [STOP_ID], **params}
    request = make_request("a", 3, 4, params=params, eos_token_ids=frozenset({EOS}))
    request.output_token_ids = output
    assert check_stop(request, output[-1], 100) == expected


def test_the_context_is_a_length() -> None:
    request = make_request("a", 3, 50, params={"min_tokens": 50})
    request.output_token_ids = [1, 1]
    assert check_stop(request, 1, 6) is None
    assert check_stop(request, 1, 5) == (LENGTH, None)


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
