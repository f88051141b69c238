"""A router in this process, in front of whole servers in this process, or of replicas that fail on purpose."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from quire.cli.top_metrics import MetricsPage
from quire.server.gate import Gate
from quire.server.keys import KeyRing
from quire.server.options import ServerOptions
from quire.server.router.fleet import Fleet
from quire.server.router.metrics import RouterMetrics
from quire.server.router.routes import RouterState, make_router_app
from quire.server.router.run import RemoteReplicas
from quire.server.run import HttpServer
from tests.server.fake_engine import running, until
from tests.server.served import CHAT, Served


class Routed(Served):
    """A running router; `answer` asks it."""

    @property
    def fleet(self) -> Fleet:
        return self.state.fleet  # type: ignore[attr-defined, no-any-return]

    async def counts(self, name: str) -> list[float]:
        """Return a metric of each replica, in order."""
        page = MetricsPage((await self.answer("GET", "/metrics")).body.decode(), 0.0)
        return [page.value(f"quire_router_{name}", replica=replica.name) for replica in self.fleet.replicas]


@contextlib.asynccontextmanager
async def routing(
    *urls: str, keys: KeyRing | None = None, upstream_key: str | None = None, **options: Any
) -> AsyncIterator[Routed]:
    """Start a router on a free port; `options` are fields of `ServerOptions`."""
    chosen = ServerOptions(**options)
    fleet = Fleet(chosen.router_policy, RouterMetrics(chosen.router_policy))
    backend = RemoteReplicas(fleet, urls, upstream_key)
    state = RouterState(chosen, fleet, backend, upstream_key)
    app = make_router_app(state)
    gate = Gate(app, state, KeyRing({}) if keys is None else keys)
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(gate)
    async with running(server, [listener]):
        await backend.start()
        try:
            router = Routed(state, app, listener.getsockname()[1], server)  # type: ignore[arg-type]
            for replica in fleet.ready:
                await until(lambda replica=replica: replica.load.block_size or replica.is_silent)
            yield router
        finally:
            await backend.stop()


def url_of(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}"


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEALTHY = {"/health/ready": {"status": "ready"}, "/v1/models": {"object": "list", "data": [{"id": "scripted"}]}}


def response(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def failing(script: Script, models: tuple[str, ...] = ("scripted",)) -> AsyncIterator[str]:
    """Start a replica that is healthy and announces nothing, whose chats run a script; yields its URL."""
    lists = {**HEALTHY, "/v1/models": {"object": "list", "data": [{"id": name} for name in models]}}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ")[1].decode()
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                if path in (CHAT, "/v1/responses", "/v1/messages"):
                    await script(reader, writer)
                    break
                found = lists.get(path)
                writer.write(response(404 if found is None else 200, json.dumps(found).encode()))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
