from hypothesis import given
from hypothesis import strategies as st

from quire.sampling_params import SamplingParams
from quire.types import Request


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=8), st.data())
def test_token_slice_runs_over_prompt_and_output(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    request = Request("r", prompt, SamplingParams(), output_token_ids=output)
    known = prompt + output
    start = data.draw(st.integers(0, len(known)))
    stop = data.draw(st.integers(start, len(known)))
    assert request.num_tokens == len(known)
    assert request.token_slice(start, stop) == known[start:stop]
