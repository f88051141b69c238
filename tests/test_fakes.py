"""The fake executor refuses what a real one would compute wrongly."""

from dataclasses import replace

import pytest

from quire.sampling_params import SamplingParams
from quire.types import BlockTableUpdate, NewRequest, ScheduledRequest, SchedulerOutput
from tests.fakes import FakeExecutor, FakeExecutorError, chain_all, device_copy, token_after
from tests.scheduler.builders import make_config


def new_request(name: str, tokens: tuple[int, ...], **fields: object) -> NewRequest:
    values: dict[str, object] = {"awaits_external_token": True, **fields}
    return NewRequest(name, tokens, len(tokens), SamplingParams(), None, (), 0, **values)  # type: ignore[arg-type]


def item(name: str, start: int, num: int, update: tuple[int, tuple[int, ...]], **fields: object) -> ScheduledRequest:
    values: dict[str, object] = {"max_new_tokens": 1, "new_token_ids": (), **fields}
    return ScheduledRequest(name, start, num, block_table_updates=(BlockTableUpdate(*update),), **values)  # type: ignore[arg-type]


def output(*scheduled: ScheduledRequest, **fields: object) -> SchedulerOutput:
    values: dict[str, object] = {"new_requests": (), "transfers": (), "preempted_ids": (), "finished_ids": ()}
    return SchedulerOutput(1, scheduled=scheduled, **{**values, **fields})  # type: ignore[arg-type]


PROMPT = (1, 2, 3, 4, 5)
FIRST = output(item("a", 0, 5, (0, (1, 2))), new_requests=(new_request("a", PROMPT),))
SECOND = output(item("a", 5, 1, (2, ()), new_token_ids=(9,)))
OTHER = new_request("b", PROMPT)


def executor() -> FakeExecutor:
    """One that knows "a": five tokens in blocks 1 and 2 of four."""
    fake = FakeExecutor(make_config())
    assert fake.execute(FIRST).results[0].token_ids[0] == token_after(chain_all(PROMPT), 0, 1000)
    return fake


def test_the_next_token_depends_on_all_tokens() -> None:
    result = executor().execute(SECOND)
    assert result.results[0].token_ids[0] == token_after(chain_all([*PROMPT, 9]), 0, 1000)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (FIRST, "already known"),
        (output(item("x", 0, 5, (0, (1, 2)))), "not known"),
        (output(finished_ids=("x",)), "told to forget 'x'"),
        (replace(SECOND, finished_ids=("a",)), "'a' is scheduled but not known"),
        (output(item("a", 5, 1, (3, ()), new_token_ids=(9,))), "update at 3 of 2"),
        (output(item("a", 5, 1, (1, (500,)), new_token_ids=(9,))), "no such block"),
        (output(item("a", 5, 1, (1, ()), new_token_ids=(9,))), "has no block 1"),
        (output(item("a", 5, 1, (1, (0,)), new_token_ids=(9,))), "has no block 1"),
        (output(item("a", 5, 1, (1, (3,)), new_token_ids=(9,))), "writes position 5|never written"),
        (output(item("a", 5, 1, (1, (1,)), new_token_ids=(9,))), "shared by 2"),
        (output(item("a", 6, 1, (2, ()), new_token_ids=(9, 9))), "positions skipped"),
        (output(item("a", 5, 1, (2, ()))), "tokens up to 6 are not known"),
        (output(item("a", 5, 1, (2, ()), new_token_ids=(9,), max_new_tokens=0)), "max_new_tokens=0"),
        (output(item("a", 5, 0, (2, ()))), "without tokens"),
        (replace(SECOND, transfers=(device_copy(0, 7, 8),)), "nothing to copy"),
        (replace(SECOND, transfers=(device_copy(0, 1, 8), device_copy(0, 2, 8))), "two copies into one block"),
        (output(item("b", 4, 1, (0, (1, 2))), new_requests=(OTHER,)), "writes block 2 shared by 2"),
        (output(item("b", 4, 1, (0, (3, 4))), new_requests=(OTHER,)), "never written"),
        (
            output(item("b", 4, 1, (0, (1, 4))), new_requests=(new_request("b", (7, 2, 3, 4, 5)),)),
            r"\[1, 2, 3, 4\] is not \[7, 2, 3, 4\]",
        ),
        (output(item("a", 5, 65, (2, ()))), "exceed the budget"),
    ],
)
def test_wrong_steps_are_refused(step: SchedulerOutput, message: str) -> None:
    with pytest.raises(FakeExecutorError, match=message):
        executor().execute(step)


def test_a_full_shared_block_may_be_read() -> None:
    step = output(item("b", 4, 1, (0, (1, 4))), new_requests=(OTHER,))
    assert executor().execute(step).results[0].token_ids[0] == token_after(chain_all(PROMPT), 0, 1000)
