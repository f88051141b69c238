"""The runner's record of requests: tokens and tables follow the schedule's updates."""

from typing import Any

import pytest

from quire.errors import EngineError
from quire.runtime.batch import RequestState, RequestStates
from quire.sampling_params import SamplingParams
from quire.types import BlockTableUpdate, NewRequest, ScheduledRequest, SchedulerOutput


def new(request_id: str, token_ids: tuple[int, ...] = (1, 2, 3)) -> NewRequest:
    return NewRequest(request_id, token_ids, len(token_ids), SamplingParams(), None, (), 0)


def item(request_id: str, *updates: BlockTableUpdate, new_token_ids: tuple[int, ...] = ()) -> ScheduledRequest:
    return ScheduledRequest(request_id, 0, 1, 1, new_token_ids, updates)


def step(**fields: Any) -> SchedulerOutput:
    empty: dict[str, Any] = dict.fromkeys(("new_requests", "scheduled", "transfers", "preempted_ids"), ())
    return SchedulerOutput(**{"step_id": 0, "finished_ids": (), **empty, **fields})


def make_states(max_num_seqs: int = 3, num_groups: int = 2) -> RequestStates:
    return RequestStates(max_num_seqs=max_num_seqs, max_model_len=20, block_size=4, num_groups=num_groups)


def known(states: RequestStates, request_id: str) -> list[int]:
    state: RequestState = states[request_id]
    return states.tokens[state.row, : state.num_tokens].tolist()


def test_rows_are_reused_and_requests_come_back() -> None:
    states = make_states(max_num_seqs=1)
    for number in range(3):
        states.apply(step(new_requests=(new("a", (number,)),)))
        assert known(states, "a") == [number]
        states.apply(step(finished_ids=("a",)) if number else step(preempted_ids=("a",)))
        assert "a" not in states.by_id
    assert len(states.tokens) == 1
    # Preempted and announced again in one step.
    states.apply(step(new_requests=(new("a"),)))
    states.apply(step(preempted_ids=("a",), new_requests=(new("a", (7, 8)),)))
    assert (len(states.by_id), states["a"].num_tokens) == (1, 2)


def test_all_are_forgotten_and_may_come_back_in_the_same_step() -> None:
    states = make_states(max_num_seqs=3)
    states.apply(step(new_requests=(new("a"), new("b"), new("c"))))
    # A step that breaks off after half of what it says.
    with pytest.raises(EngineError):
        states.apply(step(finished_ids=("c",), new_requests=(new("d"),), scheduled=(item("ghost"),)))
    again = step(new_requests=(new("b", (7,)), new("e", (8,))), forgets_all=True)
    states.apply(again)
    assert ("a" in states.by_id, "d" in states.by_id, len(states.by_id), len(states.tokens)) == (False, False, 2, 3)
    assert known(states, "b") == [7]


def test_request_that_cannot_be_taken_up_costs_no_row() -> None:
    states = make_states(max_num_seqs=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="broadcast"):
            states.apply(step(new_requests=(new("too long", tuple(range(50))),)))
    states.apply(step(new_requests=(new("a"),)))
    assert len(states.tokens) == 1


def test_more_requests_than_rows_grow_the_arrays_and_keep_their_contents() -> None:
    states = make_states(max_num_seqs=2)
    names = [f"r{number}" for number in range(9)]
    for number, name in enumerate(names):
        update = BlockTableUpdate(0, (number + 1,))
        states.apply(step(new_requests=(new(name, (number,) * 3),), scheduled=(item(name, update, update),)))
    assert len({states[name].row for name in names}) == 9
    for number, name in enumerate(names):
        assert known(states, name) == [number] * 3
        assert states.block_tables[:, states[name].row, 0].tolist() == [number + 1] * 2


def test_unknown_ids() -> None:
    states = make_states()
    states.apply(step(finished_ids=("never seen",), preempted_ids=("nor this",)))
    with pytest.raises(EngineError, match="'ghost' was scheduled"):
        states.apply(step(scheduled=(item("ghost"),)))
    states.apply(step(new_requests=(new("a"),)))
    with pytest.raises(EngineError, match="announced twice"):
        states.apply(step(new_requests=(new("a"),)))
