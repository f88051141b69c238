import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.outputs import CompletionOutput, RequestMetrics
from quire.sampling_params import SamplingParams
from quire.types import BlockTableUpdate, Request, RequestStatus, ScheduledRequest, SchedulerOutput
from tests.fakes import device_copy


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=8), st.data())
def test_token_slice_runs_over_prompt_and_output(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    request = Request("r", prompt, SamplingParams(), output_token_ids=output)
    known = prompt + output
    start = data.draw(st.integers(0, len(known)))
    stop = data.draw(st.integers(start, len(known)))
    assert request.num_tokens == len(known)
    assert request.token_slice(start, stop) == known[start:stop]


@pytest.mark.parametrize("status", list(RequestStatus))
def test_only_finished_statuses_have_a_reason(status: RequestStatus) -> None:
    assert status.is_finished == (status.finish_reason in ("stop", "length", "abort", "error"))
    assert (status.finish_reason is None) == (not status.is_finished)


def test_a_step_survives_serialisation() -> None:
    item = ScheduledRequest("r", 5, 2, 1, (7,), (BlockTableUpdate(0, (3, 4)),))
    output = SchedulerOutput(1, (), (item,), (device_copy(0, 3, 4),), ("p",), ("f",))
    assert output.num_tokens == 2
    assert msgspec.json.decode(msgspec.json.encode(output), type=SchedulerOutput) == output


def test_time_to_first_token_is_counted_from_arrival() -> None:
    assert RequestMetrics(arrival_time_s=2.0).time_to_first_token_s is None
    assert RequestMetrics(arrival_time_s=2.0, first_token_time_s=2.5).time_to_first_token_s == 0.5


def test_a_completion_is_finished_once_it_has_a_reason() -> None:
    assert not CompletionOutput(0, "", []).finished
    assert CompletionOutput(0, "", [], finish_reason="length").finished
