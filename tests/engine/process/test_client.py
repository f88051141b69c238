"""The client with an engine in a thread: both ends are real, the model is scripted."""

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.config import EngineOptions
from quire.engine.process import child
from quire.engine.process.child import EngineChannel, serve
from quire.engine.process.client import EngineClient
from quire.engine.process.messages import FromEngine, RequestUpdate, Submit
from quire.engine.process.stream import RequestStream
from quire.errors import DuplicateRequestError, EngineDeadError, QueueFullError
from quire.sampling_params import SamplingParams
from tests.engine.async_builders import make_test_of
from tests.engine.builders import ScriptedExecutor, assert_all_home, make_engine, saying

LIMIT_S = 60
PROCESSOR = make_engine()[0].input_processor


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "HEARTBEAT_S", 0.01)


def play(scenario: Callable[[EngineClient, ScriptedExecutor], Awaitable[None]], **options: Any) -> None:
    """Run a scenario with a client; afterwards all blocks must be home."""
    engine, executor = make_engine(**options)
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs, contextlib.suppress(ConnectionError):
            serve(EngineChannel(theirs), lambda start: engine)

    async def bounded() -> None:
        client = EngineClient()
        await client.attach(ours, EngineOptions())
        try:
            await asyncio.wait_for(scenario(client, executor), LIMIT_S)
        finally:
            await client.stop()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        asyncio.run(bounded())
    finally:
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert_all_home(engine)
    assert executor.is_shut_down


played = make_test_of(play)


def submission(request_id: str = "r", **options: Any) -> Submit:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 50, **options})
    return Submit(PROCESSOR.make_spec(request_id, [104, 105], params)[1])


async def read(stream: RequestStream) -> list[RequestUpdate]:
    return [update async for update in stream]


def text_of(updates: list[RequestUpdate]) -> str:
    return "".join(choice.text for update in updates for choice in update.choices)


@played()
async def test_many_requests_at_once_get_their_own_texts(client: EngineClient, executor: ScriptedExecutor) -> None:
    streams = [client.submit(submission(f"r{index}", max_tokens=index + 1)) for index in range(20)]
    for index, updates in enumerate(await asyncio.gather(*map(read, streams))):
        assert sum(len(choice.token_ids) for update in updates for choice in update.choices) == index + 1


@played(next_token=saying("hello"))
async def test_id_in_use_is_refused_and_its_owner_is_not_disturbed(
    client: EngineClient, executor: ScriptedExecutor
) -> None:
    stream = client.submit(submission())
    with pytest.raises(DuplicateRequestError, match="'r' is in use"):
        client.submit(submission())
    assert text_of(await read(stream)) == "hello"


@played()
async def test_aborted_request_frees_its_blocks(client: EngineClient, executor: ScriptedExecutor) -> None:
    stream = client.submit(submission(max_tokens=100, ignore_eos=True))
    async for _ in stream:
        break
    client.abort(stream)
    client.abort(stream)
    assert client.num_requests == 0
    assert text_of(await read(client.submit(submission("s", max_tokens=2)))) != ""


@played(next_token=saying("hello"), max_num_seqs=2, max_num_waiting=4)
async def test_refused_request_raises_its_error_and_others_go_on(
    client: EngineClient, executor: ScriptedExecutor
) -> None:
    streams = [client.submit(submission(f"r{index}")) for index in range(40)]
    results = await asyncio.gather(*map(read, streams), return_exceptions=True)
    refused = [result for result in results if isinstance(result, QueueFullError)]
    assert refused
    assert all(text_of(result) == "hello" for result in results if isinstance(result, list))
    assert len(refused) + sum(isinstance(result, list) for result in results) == 40


def test_heartbeats_come_while_a_step_computes() -> None:
    held, release = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        held.set()
        release.wait(LIMIT_S)

    async def scenario(client: EngineClient, executor: ScriptedExecutor) -> None:
        executor.in_step = hold
        stream = client.submit(submission())
        await asyncio.to_thread(held.wait, LIMIT_S)
        heard_s = client.last_heard_s
        while client.last_heard_s == heard_s:
            await asyncio.sleep(0.001)
        release.set()
        assert text_of(await read(stream)) == "hello"

    play(scenario, next_token=saying("hello"))


def test_process_that_cannot_be_started_is_said_so_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[socket.socket, socket.socket]] = []
    make_pair = socket.socketpair

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(socket, "socketpair", lambda: pairs.append(make_pair()) or pairs[-1])
    monkeypatch.setattr(subprocess, "Popen", refuse)

    async def scenario() -> None:
        with pytest.raises(EngineDeadError, match="cannot be started: Cannot allocate memory"):
            await EngineClient().start(EngineOptions())

    with asyncio.Runner() as runner:
        runner.get_loop()  # it has a pair of its own
        pairs.clear()
        runner.run(scenario())
    assert [end.fileno() for pair in pairs for end in pair] == [-1, -1]


def test_when_the_engine_dies_every_request_is_told() -> None:
    deaths: list[EngineDeadError] = []

    async def scenario(client: EngineClient, executor: ScriptedExecutor) -> None:
        client._on_death = deaths.append
        streams = [client.submit(submission(f"r{index}")) for index in range(3)]
        client._transport.abort()
        for result in await asyncio.gather(*map(read, streams), return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        with pytest.raises(EngineDeadError, match="ended unexpectedly"):
            client.submit(submission("late"))
        assert len(deaths) == 1

    play(scenario)


def test_request_before_the_engine_is_ready_is_refused() -> None:
    with pytest.raises(EngineDeadError, match="not ready"):
        EngineClient().submit(submission())


@played(next_token=saying("hello"))
async def test_progress_is_counted_from_the_first_of_the_requests_and_from_each_step(
    client: EngineClient, executor: ScriptedExecutor
) -> None:
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    stream = client.submit(submission())
    given_s = client.progress_s
    assert before_s <= given_s <= loop.time()
    other = client.submit(submission("other", max_tokens=1))
    assert client.progress_s == given_s, "work was under way already"
    await asyncio.gather(read(stream), read(other))
    assert client.progress_s > given_s
    stepped_s = client.progress_s
    while client.last_heard_s == stepped_s:
        await asyncio.sleep(0.001)
    assert client.progress_s == stepped_s, "a heartbeat is no progress"


class NotingChannel(EngineChannel):
    """Writes down what is sent."""

    def __init__(self, connection: socket.socket, events: list[str]) -> None:
        super().__init__(connection)
        self._events = events

    def send(self, message: FromEngine) -> None:
        self._events.append(type(message).__name__)
        super().send(message)


@pytest.mark.parametrize("is_replacement", [True, False])
def test_engine_that_replaces_another_is_warm_before_it_is_ready(is_replacement: bool) -> None:
    """Requests come to it at once. Those of the first one come later, so that it warms up beside the server."""
    engine, _ = make_engine()
    events: list[str] = []
    is_attached, is_warm = threading.Event(), threading.Event()

    def warm_up() -> None:
        assert is_replacement or is_attached.wait(LIMIT_S)
        events.append("warm")
        is_warm.set()

    engine.input_processor.grammars.warm_up = warm_up  # type: ignore[method-assign]
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs, contextlib.suppress(ConnectionError):
            serve(NotingChannel(theirs, events), lambda start: engine)

    async def attach() -> None:
        client = EngineClient()
        await client.attach(ours, EngineOptions(), is_replacement=is_replacement)
        is_attached.set()
        await client.stop()

    thread = threading.Thread(target=run)
    thread.start()
    asyncio.run(attach())
    thread.join(LIMIT_S)
    assert is_warm.wait(LIMIT_S)
    assert events == (["warm", "Ready"] if is_replacement else ["Ready", "warm"])
