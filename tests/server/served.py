"""A whole server in one process: real sockets, the real gate and application, the real engine without a model.

The engine's loop runs in a thread instead of a process, on a scripted executor.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from quire.engine.process.child import EngineChannel, EngineLoop
from quire.engine.process.client import EngineClient
from quire.engine.process.messages import Ready
from quire.errors import EngineDeadError
from quire.server.connection import Connection
from quire.server.gate import Gate
from quire.server.keys import KeyRing
from quire.server.options import ServerOptions
from quire.server.routes import make_app
from quire.server.run import HttpServer
from quire.server.state import ServerState
from tests.engine.builders import NextToken, ScriptedExecutor, make_engine, mixing
from tests.server.fake_engine import LIMIT_S, ReadyEngines, ReadySupervisor, running

CHAT = "/v1/chat/completions"


class ThreadedEngineClient(EngineClient):
    """Its engine runs in a thread of this process."""

    def __init__(self, next_token: NextToken = mixing, **scheduler: Any) -> None:
        super().__init__()
        self.engine, self.executor = make_engine(next_token, **scheduler)
        self._thread: threading.Thread | None = None
        self._loop: EngineLoop | None = None

    @property
    def commands(self) -> list[Any]:
        """Return what the engine will take at the end of its step: submissions, aborts, watchers."""
        assert self._loop is not None
        return list(self._loop._driver._inbox)

    async def begin(self) -> None:
        ours, theirs = socket.socketpair()
        loop = self._loop = EngineLoop(self.engine, EngineChannel(theirs))

        def work() -> None:
            with contextlib.suppress(EngineDeadError, OSError):
                loop.run()
            theirs.close()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        event_loop = asyncio.get_running_loop()
        self._transport, _ = await event_loop.create_connection(lambda: self, sock=ours)
        self.last_heard_s = event_loop.time()
        self.ready = Ready(self.engine.config, {})

    async def stop(self) -> None:
        self._is_stopping = True
        if self._transport is not None:
            self._transport.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10)


class Served:
    """A running server. `answer` asks it over a new connection each time."""

    def __init__(self, state: ServerState, app: Any, port: int, server: uvicorn.Server) -> None:
        self.state = state
        self.app = app
        self.port = port
        self.server = server

    @property
    def supervisor(self) -> ReadySupervisor:
        return self.state.engines.supervisors[0]  # type: ignore[return-value]

    @property
    def executor(self) -> ScriptedExecutor:
        return self.supervisor.the_client.executor

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, data: bytes, *, timeout_s: float = 20) -> bytes:
        """Send bytes, read until the server closes."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            received = b""
            with contextlib.suppress(ConnectionError):
                while piece := await asyncio.wait_for(reader.read(1 << 16), timeout_s):
                    received += piece
            return received
        finally:
            writer.close()

    async def answer(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: Any = None
    ) -> "Answer":
        """Send one request. Returns: its whole answer."""
        given = {"Host": f"127.0.0.1:{self.port}", "Connection": "close"} | (headers or {})
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        if body is not None:
            given = {"Content-Type": "application/json", "Content-Length": str(len(data))} | given
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        return Answer(await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + data))

    async def chat(self, *, headers: dict[str, str] | None = None, text: str = "hi", **fields: Any) -> "Answer":
        return await self.answer("POST", CHAT, headers=headers, body=chat_body(text=text, **fields))

    async def until_idle(self) -> None:
        """Wait until the engine has nothing to do and has said so."""

        def is_busy() -> bool:
            client = self.supervisor.the_client
            return client.num_requests or client.engine.has_unfinished_requests() or self.server_requests()

        async with asyncio.timeout(LIMIT_S):
            while is_busy():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)

    def server_requests(self) -> int:
        return self.state.admission.num_requests


def chat_body(*, text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], "max_tokens": 4} | fields


class Answer:
    """A parsed answer."""

    def __init__(self, data: bytes) -> None:
        head, _, rest = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1]) if data else 0
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.body = dechunked(rest) if self.headers.get("transfer-encoding") == "chunked" else rest

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        error = self.json["error"]
        return error["code"] if "code" in error else error["details"]["error_code"]  # OpenAI's shape, or Anthropic's


def dechunked(data: bytes) -> bytes:
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        found += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return found


def make_state(*clients: ThreadedEngineClient, **options: Any) -> ServerState:
    name = options.get("served_model_name", "scripted")
    return ServerState(ServerOptions(**options), name, ReadyEngines(*(clients or [ThreadedEngineClient()])))


@contextlib.asynccontextmanager
async def serving(
    *,
    keys: KeyRing | None = None,
    connection: type[Connection] = Connection,
    next_token: NextToken = mixing,
    scheduler: dict[str, Any] | None = None,
    num_engines: int = 1,
    **options: Any,
) -> AsyncIterator[Served]:
    """Start a server on a free port; `options` are fields of `ServerOptions`."""
    clients = [ThreadedEngineClient(next_token, **(scheduler or {})) for _ in range(num_engines)]
    for client in clients:
        await client.begin()
    state = make_state(*clients, **options)
    app = make_app(state)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = HttpServer(Gate(app, state, KeyRing({}) if keys is None else keys), connection)
    try:
        async with running(server, [listener]):
            yield Served(state, app, listener.getsockname()[1], server)
    finally:
        for client in clients:
            await client.stop()


def quick(**times: float) -> type[Connection]:
    """Return a kind of `Connection` with other time limits."""
    return type("QuickConnection", (Connection,), times)
