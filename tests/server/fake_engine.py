"""The server without a model: `FakeEngine` is a real scheduler and output processor around a scripted executor.

It is an `EngineClient` and runs in the test's event loop, so that a test can stop it between two steps, look
at what it was sent, and let it die. `make_server` puts the application around it; `requests_to` talks to that.
"""

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import httpx2
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config import EngineOptions
from quire.engine.process.child import update_of
from quire.engine.process.client import EngineClient
from quire.engine.process.messages import Abort, Ready, RequestUpdate, Submit, Updates
from quire.errors import QuireError
from quire.parallel.frames import SentError
from quire.server.engines import Engines
from quire.server.front_end import FrontEnd
from quire.server.options import ServerOptions
from quire.server.request_record import RECORD_KEY, Caller, RequestRecord
from quire.server.routes import make_app
from quire.server.state import ServerState
from quire.server.supervisor import EngineState, Supervisor
from quire.text.dialogue import Dialogue
from quire.types import RequestSpec
from tests.engine.builders import byte_tokenizer, make_engine

MODEL = "tiny"
LIMIT_S = 60.0
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES}


def record_of(client_id: str = "anonymous") -> RequestRecord:
    """Return a request's record, as the gate makes it."""
    return RequestRecord("id", "POST", "/", Caller(client_id))


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    while not condition():
        await asyncio.sleep(0.001)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(LIMIT_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


class FakeEngine(EngineClient):
    """A client whose engine runs in this event loop, not in a process.

    submitted: all requests, in order. aborted: ids whose reader left before their end.
    gate: while cleared, no step is computed. num_ahead: steps that are still let through while it is cleared.
    """

    def __init__(self, **engine: Any) -> None:
        super().__init__()
        self.engine, self.executor = make_engine(**engine)
        self.ready = Ready(self.engine.config, {})
        self.last_heard_s = float("inf")
        self.submitted: list[RequestSpec] = []
        self.aborted: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_ahead = 0
        self._task: asyncio.Task[None] | None = None

    def _send(self, message: Any) -> None:
        if isinstance(message, Abort):
            self.aborted += message.request_ids
            return self.engine.abort_request(message.request_ids)
        self.submitted.append(message.spec)
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit)
        try:
            complete = self.engine.input_processor.complete
            self.engine.submit(complete(received.spec, streams=received.streams, tells_news=True))
        except QuireError as error:
            self._put(RequestUpdate(message.spec.request_id, finished=True, failure=SentError.of(error)))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def die(self) -> None:
        self.connection_lost(None)

    async def _run(self) -> None:
        while self.engine.has_unfinished_requests() and self.dead_error is None:
            if self.num_ahead > 0:
                self.num_ahead -= 1
            else:
                await self.gate.wait()
            self._put(*map(update_of, self.engine.step()))
            await asyncio.sleep(0)

    def _put(self, *updates: RequestUpdate) -> None:
        self._received(Updates(list(updates), self.statistics))


class ReadySupervisor(Supervisor):
    """Supervisor of an engine that runs in this process."""

    def __init__(self, client: Any, options: EngineOptions) -> None:
        """`client`: a `FakeEngine`, or another client with an `engine`."""
        super().__init__(options, self._do_nothing, self._do_nothing)
        self.the_client = self._client = client
        self.state = EngineState.READY

    def _do_nothing(self, event: Any) -> Any:
        """No process ends or is loaded."""


class ReadyEngines(Engines):
    """Engines that run in this process, from the beginning and also while they sleep."""

    def __init__(self, *clients: Any) -> None:
        """`clients`: as `ReadySupervisor` takes them."""
        config = clients[0].engine.config
        options = EngineOptions(max_num_seqs=config.scheduler.max_num_seqs, data_parallel_size=len(clients))
        super().__init__(options, lambda error: None)
        self.supervisors = [ReadySupervisor(client, options) for client in clients]
        self._front_end = FrontEnd(config, byte_tokenizer(), None)

    async def sleep(self) -> None:
        """Do nothing: there is no process to end."""

    async def wake_up(self) -> None:
        """Do nothing: the engines have gone on."""


def make_server(engine: FakeEngine | None = None, **settings: Any) -> tuple[Starlette, FakeEngine]:
    """Return the application and its engine; `settings` are `FakeEngine`'s."""
    engine = engine or FakeEngine(**settings)
    app = make_app(ServerState(ServerOptions(), MODEL, ReadyEngines(engine)))
    app.add_middleware(Recorded)
    return app, engine


def use_template(app: Starlette, template: str) -> None:
    """Give the application's model another chat template."""
    front_end = app.state.quire.engines.front_end
    front_end.dialogue = Dialogue({"default": template}, front_end.tokenizer)


class Recorded:
    """Gives each request a record, as the gate does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, RECORD_KEY: record_of()}, receive, send)


def requests_to(app: Starlette, **headers: str) -> httpx2.AsyncClient:
    """Return a client of the application, without a socket. A stream's body comes as a whole."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://quire", headers=headers, timeout=60)


async def post(app: Starlette, path: str, body: Any) -> httpx2.Response:
    """Send one request to the application."""
    async with requests_to(app) as client:
        return await client.post(path, json=body)


@contextlib.asynccontextmanager
async def running(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> AsyncIterator[None]:
    """Run uvicorn without its loop, which looks only ten times a second if it should end."""
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=sockets)
    await server.on_tick(0)
    try:
        yield
    finally:
        state = server.server_state
        for listener in server.servers:
            listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.001)
        for task in state.tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def listening(app: Starlette) -> AsyncIterator[str]:
    """Serve the application on a free port; yields its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none"))
    async with running(server):
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def events(body: str) -> Iterator[tuple[str | None, str]]:
    """Name and data of each event of a stream."""
    for block in body.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line)
        if lines:
            yield lines.get("event"), lines["data"]


def chunks(body: str) -> list[dict[str, Any]]:
    """Return the events of an OpenAI stream as JSON; checks that it ends with [DONE]."""
    data = [item for _, item in events(body)]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def assert_error(response: httpx2.Response, status: int, code: str | None, param: str | None = None) -> str:
    """Check that the answer is this error, in OpenAI's shape. Returns its message."""
    assert response.status_code == status, response.text
    (key, error), *others = response.json().items()
    assert (key, others) == ("error", [])
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert 0 < len(error["message"]) <= 2000
    message: str = error["message"]
    return message
