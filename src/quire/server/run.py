"""Serves until told to stop: binds the port, starts the engine, drains on SIGTERM.

The port is bound before the model is loaded, so that a port in use is said at once. Next to read: `app.py`.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn

from quire.config import EngineOptions
from quire.errors import ConfigError, QuireError
from quire.server.app import make_app
from quire.server.connection import Connection
from quire.server.gate import wrap
from quire.server.logs import use_format
from quire.server.options import ServerOptions
from quire.server.state import ServerState
from quire.server.supervisor import Supervisor

BACKLOG = 2048


def serve(
    engine_options: EngineOptions,
    options: ServerOptions,
    *,
    chat_template: str | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises: ConfigError, ModelError, CapacityError; EngineDeadError if the engine dies for good.
    """
    use_format(options.log_format)
    listener = bind(options.host, options.port)
    with listener:
        asyncio.run(_serve(listener, engine_options, options, chat_template, on_ready))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: ConfigError if the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host={host!r} is not an address of this machine: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or 0 for any free one"
        ) from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn, without its own handling of signals."""

    def install_signal_handlers(self) -> None:
        """Signals are `_serve`'s."""


async def _serve(
    listener: socket.socket,
    engine_options: EngineOptions,
    options: ServerOptions,
    chat_template: str | None,
    on_ready: Callable[[str], None],
) -> None:
    failure: list[QuireError] = []

    def stop(error: QuireError | None = None) -> None:
        if error is not None:
            failure.append(error)
        server.should_exit = True

    supervisor = Supervisor(engine_options, chat_template, stop)
    state = ServerState(options, options.model_name(engine_options), supervisor)
    app = wrap(make_app(state), state)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", http=Connection, ws="none", server_header=False,
        timeout_graceful_shutdown=int(options.drain_timeout_s), log_level=logging.WARNING,
    )  # fmt: skip
    server = _Server(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await supervisor.start()
        host, port = listener.getsockname()[:2]
        on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await serving
    finally:
        server.should_exit = True
        await supervisor.stop()
        await asyncio.gather(serving, return_exceptions=True)
    if failure:
        raise failure[0]
