"""Requests are computed together, and none outlives its reader."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from quire.errors import EngineDeadError
from quire.sampling_params import SamplingParams
from quire.server.errors import ApiError
from quire.server.front_end import PromptTokens
from quire.server.generation import collect, generate, new_id
from quire.server.request_record import ANONYMOUS
from quire.server.routes.exchange import check_grammars
from quire.server.state import ServerState
from quire.structured_outputs import StructuredOutputsParams
from quire.types import RequestSpec
from tests.engine.builders import saying
from tests.server.fake_engine import FakeEngine, in_loop, make_server, record_of, until


def make_state(**settings: Any) -> tuple[ServerState, FakeEngine]:
    app, engine = make_server(**settings)
    return app.state.quire, engine


def requests(state: ServerState, num: int, **params: Any) -> list[RequestSpec]:
    front_end = state.engines.front_end
    chosen = SamplingParams(**{"max_tokens": 8, **params})
    return [front_end.prepare(new_id("t"), PromptTokens(None, [position + 1]), chosen) for position in range(num)]


@pytest.mark.parametrize("num", [1, 40])
@in_loop
async def test_admission_is_held_until_the_end(num: int) -> None:
    state, engine = make_state(num_blocks=2000)
    async with aclosing(generate(state, requests(state, num, n=2), record_of(), streams=True)) as updates:
        await anext(updates)
        assert state.admission.num_requests == 2 * num
    assert state.admission.num_requests == 0
    assert engine.num_requests == 0
    assert len(engine.aborted) == num


@in_loop
async def test_request_that_the_engine_aborts_is_an_error() -> None:
    state, engine = make_state()
    (request,) = requests(state, 1, max_tokens=100)
    engine.gate.clear()
    engine.num_ahead = 2
    async with aclosing(generate(state, [request], record_of(), streams=True)) as updates:
        await anext(updates)
        engine.engine.abort_request([request.request_id])
        engine.gate.set()
        with pytest.raises(ApiError) as caught:
            [update async for update in updates]
    assert (caught.value.status, caught.value.code) == (503, "aborted")


@in_loop
async def test_updates_of_one_step_come_together() -> None:
    state, engine = make_state()
    engine.gate.clear()
    async with aclosing(generate(state, requests(state, 3), record_of(), streams=True)) as updates:
        waiting = asyncio.ensure_future(anext(updates))
        await until(lambda: len(engine.submitted) == 3)
        engine.gate.set()
        batches = [await waiting, *[batch async for batch in updates]]
    assert [index for index, _ in batches[-1]] == [0, 1, 2]
    tokens = [[token for batch in batches for at, update in batch if at == index for choice in update.choices
               for token in choice.token_ids] for index in range(3)]  # fmt: skip
    assert [len(found) for found in tokens] == [8, 8, 8]


@in_loop
async def test_error_behind_an_unread_update_reaches_the_reader() -> None:
    state, engine = make_state()
    engine.gate.clear()
    async with aclosing(generate(state, requests(state, 2, max_tokens=100), record_of(), streams=True)) as updates:
        waiting = asyncio.ensure_future(anext(updates))
        await until(lambda: len(engine.submitted) == 2)
        engine.num_ahead = 3
        engine.gate.set()
        await waiting
        await until(lambda: engine.num_ahead == 0)
        engine.die()
        with pytest.raises(EngineDeadError):
            [batch async for batch in updates]


@in_loop
async def test_engine_gets_the_checked_grammar() -> None:
    state, engine = make_state(next_token=saying("abc"))
    form = StructuredOutputsParams(regex="[a-c]{3}")
    for constrained in (requests(state, 1, structured_outputs=form), requests(state, 1)):
        await check_grammars(state, ANONYMOUS, constrained)
        await collect(state, constrained, record_of())
    with_form, without = engine.submitted
    assert "[a-c]{3}" in (with_form.checked_grammar or "")
    assert without.checked_grammar is None
