import msgspec
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling_params import SamplingParams
from quire.types import BlockTableUpdate, Request, ScheduledRequest, SchedulerOutput
from tests.fakes import device_copy


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=8), st.data())
def test_token_slice_runs_over_prompt_and_output(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    request = Request("r", prompt, SamplingParams(), output_token_ids=output)
    known = prompt + output
    start = data.draw(st.integers(0, len(known)))
    stop = data.draw(st.integers(start, len(known)))
    assert request.num_tokens == len(known)
    assert request.token_slice(start, stop) == known[start:stop]


def test_a_step_survives_serialisation() -> None:
    item = ScheduledRequest("r", 5, 2, 1, (7,), (BlockTableUpdate(0, (3, 4)),))
    output = SchedulerOutput(1, (), (item,), (device_copy(0, 3, 4),), ("p",), ("f",))
    assert output.num_tokens == 2
    assert msgspec.json.decode(msgspec.json.encode(output), type=SchedulerOutput) == output
