import pytest

from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.types import NewRequest
from tests.sampling.builders import new_request, params

VOCAB_SIZE = 10


def state_of(new: NewRequest) -> SamplingState:
    assert new.sampling is not None
    return SamplingState(new, new.sampling, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (params(temperature=0), True),
        (params(temperature=0, top_p=0.5, top_k=3, min_p=0.1), True),
        (params(), False),
        (params(temperature=0, logprobs=0), False),
        (params(temperature=0, logit_bias={1: 1.0}), False),
        (params(temperature=0, logit_bias={}), True),
        (params(temperature=0, allowed_token_ids=[1]), False),
        (params(temperature=0, presence_penalty=0.1), False),
        (params(temperature=0, repetition_penalty=1.1), False),
    ],
)
def test_what_is_plain_greedy(sampling: SamplingParams, expected: bool) -> None:
    assert state_of(new_request(sampling=sampling)).is_plain_greedy == expected


def test_min_tokens_end() -> None:
    state = state_of(new_request(sampling=params(temperature=0, min_tokens=2, stop_token_ids=[3, 99]), eos=[4]))
    for _ in range(2):
        assert state.bans_end
        assert not state.is_plain_greedy
        assert state.banned_next() == {3, 4}
        state.append(1)
    assert not state.bans_end
    assert state.is_plain_greedy
    assert state.banned_next() == set()
