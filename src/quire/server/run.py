"""Life of the server: binds the port, starts the engine, serves, drains on SIGTERM.

The port is bound before the model is loaded, so that a port in use is an error at once; the health routes answer from
then on. The first SIGTERM or SIGINT refuses new requests and lets running ones finish; a second one ends the server.
Next to read: `gate.py`, `routes/__init__.py`.
"""

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import uvicorn

from quire.config import EngineOptions
from quire.errors import ConfigError, QuireError
from quire.linux import resident_bytes, return_free_memory, return_large_blocks
from quire.server.connection import ACCEPTED_AT_ONCE, Connection, Places
from quire.server.gate import Gate
from quire.server.logs import use_format
from quire.server.models import Models, make_models
from quire.server.options import ServerOptions
from quire.server.registration import registered
from quire.server.routes import make_app

LOGGER = logging.getLogger("quire.server")
BACKLOG = 2048
"""Connections that the kernel holds until the event loop accepts them."""
LAST_WORDS_S = 2
"""Time that answers have to reach their clients after the last step."""
DRAIN_CHECK_S = 0.02
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RETURN_TICKS = 50
"""uvicorn's ticks of 0.1 s between two looks at the process's memory."""
RETURN_BYTES = 16 << 20
"""Growth after which free memory is returned to the system."""
FILES_WARNING_S = 60.0
"""At most one line about too many open files is logged within this time."""
SWITCH_INTERVAL_S = 0.0005
"""Longest time that a thread keeps the interpreter from the event loop, which needs it after every system call.
Python's 5 ms made a probe wait 0.7 s while two of the worst chat templates were rendered."""


def serve(
    engine_options: EngineOptions,
    options: ServerOptions,
    *,
    others: Mapping[str, EngineOptions] | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT. `others`: further models by name, all loaded on demand then.

    Raises: ConfigError, ModelError, CapacityError; EngineDeadError if the engine dies for good.
    """
    prepare_process(options)
    by_name = {options.model_name(engine_options): engine_options, **(others or {})}
    with bind(options.host, options.port) as listener, registered(url_of(listener), ", ".join(by_name)):
        asyncio.run(Service(listener, model_server(by_name, options)).run(on_ready))


def prepare_process(options: ServerOptions) -> None:
    """Set what all connections of a server's process need. Mutates: the process."""
    use_format(options.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_file_limit()
    return_large_blocks()
    # What is imported stays: each full collection would look through it, for 20 to 60 ms in which no stream goes on.
    gc.collect()  # garbage that is there, as of a program that calls `serve`, must not stay with it
    gc.freeze()


def raise_file_limit() -> None:
    """Raise the soft limit of open files, each connection being one, to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises: ConfigError if the address is taken or not of this machine."""
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
        if error.errno == errno.EADDRNOTAVAIL:
            step = "it is no address of this machine: choose another --host"
        elif error.errno == errno.EACCES:
            step = "choose a --port of 1024 or above, or 0 for any free one"
        else:
            step = "choose another --port, or 0 for any free one"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; {step}") from None
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn with Quire's settings, and without its own handling of signals."""

    def __init__(self, gate: Gate, connection: type[Connection] = Connection) -> None:
        """`connection`: the class that speaks HTTP."""
        config = uvicorn.Config(
            gate,
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=LAST_WORDS_S,
            log_level=logging.WARNING,
        )
        super().__init__(config)
        self.server_state = Places()
        self._least_bytes: int | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Service`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. The event loop takes its backlog for the kernel's too, which shall hold more."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Do uvicorn's regular work, and return memory that the process needed for a while."""
        if counter % RETURN_TICKS == 0:
            await self.return_memory()
        return await super().on_tick(counter)

    async def return_memory(self) -> None:
        """Return free memory to the system if the process has grown since there was least, or since the last time."""
        num_bytes = resident_bytes()
        if self._least_bytes is not None and num_bytes > self._least_bytes + RETURN_BYTES:
            await asyncio.to_thread(return_free_memory)
            self._least_bytes = resident_bytes()
        elif self._least_bytes is None or num_bytes < self._least_bytes:
            self._least_bytes = num_bytes


Build: TypeAlias = Callable[[Callable[[QuireError], None]], tuple[Models, Gate]]
"""Makes a server and its application; its argument is called with the error that ends the server."""


def model_server(engine_options: Mapping[str, EngineOptions], options: ServerOptions) -> Build:
    """Return the `Build` of a server of models, by their names."""

    def build(on_lost: Callable[[QuireError], None]) -> tuple[Models, Gate]:
        models = make_models(engine_options, options, on_lost)
        state = models.default
        return models, Gate(make_app(state, models), state)

    return build


class Service:
    """Run of a server, from the bound port to the last answer."""

    def __init__(
        self, listener: socket.socket, build: Build, *, signals: Sequence[signal.Signals] = ENDING_SIGNALS
    ) -> None:
        """`signals`: those that end it."""
        self._listener, self._signals = listener, signals
        self._served, gate = build(self._on_engine_lost)
        self._http = HttpServer(gate)
        self._failure: QuireError | None = None
        self._num_signals = 0
        self._next_files_warning_s = 0.0
        self._stop_wanted = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Serve. Raises: the error for which the engine cannot start or go on."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in self._signals:
            loop.add_signal_handler(number, self._on_signal)
        answering = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        starting = asyncio.create_task(self._served.start())
        stopping = asyncio.create_task(self._stop_wanted.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stop_wanted.is_set():
                starting.result()
                on_ready(url_of(self._listener))
                _notify("READY=1")
                await stopping
            await self._drain()
        finally:
            for task in (starting, stopping):
                task.cancel()
            await self._served.stop()
            self._http.should_exit = True
            await asyncio.gather(answering, starting, stopping, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End at once, without draining."""
        self._on_signal()
        self._on_signal()

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop_wanted.set()
        if self._num_signals > 1:
            self._http.force_exit = True
            self._stop_now.set()

    def _on_engine_lost(self, error: QuireError) -> None:
        self._failure = error
        self._stop_wanted.set()
        self._stop_now.set()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_files_warning_s:
            self._next_files_warning_s = loop.time() + FILES_WARNING_S
            LOGGER.error("no connection can be accepted: too many open files; raise the limit with `ulimit -n`")

    async def _drain(self) -> None:
        """Refuse new requests and wait for running ones."""
        _notify("STOPPING=1")
        self._served.is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._served.options.drain_timeout_s
        num_requests = self._served.num_requests
        if num_requests:
            LOGGER.warning(
                "draining: %d requests have %g s to finish", num_requests, self._served.options.drain_timeout_s
            )
        while self._served.num_requests and loop.time() < deadline and not self._stop_now.is_set():
            await asyncio.sleep(DRAIN_CHECK_S)


def url_of(listener: socket.socket) -> str:
    """Return the address of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _notify(message: str) -> None:
    """Tell systemd, if it asked to be told."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            try:
                connection.connect(f"\0{path[1:]}" if path.startswith("@") else path)
                connection.sendall(message.encode())
            except OSError as error:
                LOGGER.warning("NOTIFY_SOCKET cannot be used: %s", error.strerror)
