"""EOS, then stop tokens, then length."""

from typing import Any

import pytest

from quire.sampling_params import SamplingParams
from quire.types import RequestStatus, find_stop

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
