"""Client of an engine process: starts it and exchanges messages with it, in one event loop.

`EngineClient.submit` returns a `RequestStream` whose updates are read by one coroutine. When the process ends,
every waiting coroutine gets an `EngineDeadError`. Knows no HTTP and no tensors.
Next to read: `stream.py`, `messages.py`, `child.py`.
"""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable

import msgspec

from quire.config import EngineOptions
from quire.engine.process.messages import (
    Abort,
    FromEngine,
    Heartbeat,
    Lines,
    Ready,
    Start,
    Statistics,
    Submit,
    ToEngine,
    Updates,
    Watch,
)
from quire.engine.process.prefixes import PrefixMirror
from quire.engine.process.stream import RequestStream
from quire.errors import DuplicateRequestError, EngineDeadError
from quire.parallel.frames import FrameReader, frame

REAP_CHECK_S = 0.01
MAX_UNREAD_LINES = 64
"""Messages of event lines that a watcher may leave unread; then it is cut off."""
WATCH_PAUSE_S = 1.0
KILL_AFTER_S = 5.0
"""Time that a process may take to end after its socket is closed: a step of long prompts takes a second."""


class EngineClient(asyncio.Protocol):
    """Handle of one engine process; a new process needs a new client.

    `statistics`: as of the last step; `on_death` is called once. In the loop's time: `last_heard_s`, the last message;
    `progress_s`, the last step, or the first request after an idle time.
    """

    def __init__(self, on_death: Callable[[EngineDeadError], None] | None = None) -> None:
        self.statistics = Statistics()
        self.prefixes = PrefixMirror()
        self.last_heard_s = 0.0
        self.progress_s = 0.0
        self.ready: Ready | None = None
        self.dead_error: EngineDeadError | None = None
        self.pid: int | None = None
        self._on_death = on_death
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._streams: dict[str, RequestStream] = {}
        self._watchers: dict[asyncio.Queue[bytes], str] = {}
        """Of each watcher: the client that it is."""
        self._is_stopping = False
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._starting: asyncio.Future[Ready] | None = None
        self._reaping: asyncio.Future[None] | None = None

    # --- Life -----------------------------------------------------------------------------------

    async def start(self, options: EngineOptions, *, is_replacement: bool = False) -> Ready:
        """Start the process and wait until its model is loaded.

        Raises: the error that loading the model raised; EngineDeadError if the process cannot be started, or ended
        without a message.

        is_replacement: the server is already running, so requests will come at once.
        """
        try:
            connection = self._spawn()
        except OSError as error:
            raise EngineDeadError(f"the engine process cannot be started: {error.strerror or error}") from error
        return await self.attach(connection, options, is_replacement=is_replacement)

    def _spawn(self) -> socket.socket:
        """Start the process. Returns: our end of the socket. Raises: OSError if memory or files are short."""
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            command = [sys.executable, "-P", "-m", "quire.engine.process.child", str(theirs.fileno())]
            try:
                # With a session of its own it gets no interrupt that is typed at the terminal.
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError:
                ours.close()
                raise
        self.pid = self._process.pid
        return ours

    async def attach(self, connection: socket.socket, options: EngineOptions, *, is_replacement: bool = False) -> Ready:
        """Connect to the engine at the other end of a socket. Raises: as `start`."""
        loop = asyncio.get_running_loop()
        self._starting = loop.create_future()
        self._transport, _ = await loop.create_connection(lambda: self, sock=connection)
        self._send(Start(options, is_replacement))
        try:
            self.ready = await self._starting
        except BaseException:
            how = None if self.dead_error is None or self._is_stopping else await self.describe_end()
            await self.stop()
            if how is not None:
                raise EngineDeadError(f"{how}, while it was loading the model") from None
            raise
        return self.ready

    async def stop(self) -> None:
        """End the process and all its requests. A second call does nothing."""
        self._is_stopping = True
        if self._transport is not None:
            self._transport.close()
        if self.ready is None:
            self.kill()  # while loading it does not read the socket
        await self._reap()

    async def _reap(self) -> None:
        """Wait for the end of the process after its socket is closed; it may compute a last step."""
        if self._process is None:
            return
        for _ in range(round(KILL_AFTER_S / REAP_CHECK_S)):
            if self._process.poll() is not None:
                return
            await asyncio.sleep(REAP_CHECK_S)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def describe_end(self) -> str:
        """Wait until the process is gone. Returns: a sentence with the signal or status that it ended with."""
        await self._reap()
        status = None if self._process is None else self._process.returncode
        return f"the engine's process {'ended' if status is None else describe_status(status)}"

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()

    # --- Requests -------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def submit(self, message: Submit, ready: asyncio.Event | None = None) -> RequestStream:
        """Send a request and return the stream of its updates, which sets `ready` at each.

        Raises: EngineDeadError; DuplicateRequestError while another request has this id.
        """
        self.check_alive()
        request_id = message.spec.request_id
        if request_id in self._streams:
            raise DuplicateRequestError(f"request id '{request_id}' is in use by a running request")
        if not self._streams:
            self.progress_s = asyncio.get_running_loop().time()
        stream = self._streams[request_id] = RequestStream(request_id, ready)
        self._send(message)
        return stream

    def is_running(self, stream: RequestStream) -> bool:
        """Return whether a request has not ended here."""
        return self._streams.get(stream.request_id) is stream

    def abort(self, stream: RequestStream) -> None:
        """Abort a request whose reader is gone; does nothing if it has ended.

        Its id must not be used again: late updates would go to the new request's stream.
        """
        if self.is_running(stream):
            del self._streams[stream.request_id]
            if self.dead_error is None:
                self._send(Abort([stream.request_id]))

    async def watch(
        self, client_id: str, *, op_period: int = 0, op_interval_s: float = 0.0, with_text: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield the engine's event lines for a client until the caller closes the generator, reads too slowly, or the
        engine ends. They have the ids of the client's own requests and other names for all others.

        Yields nothing but `b""` after each second without events.

        Every new watcher makes the engine send a header to all of its client, which restates the whole state. The
        options of the last one hold. Raises: EngineDeadError.
        """
        self.check_alive()
        queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_UNREAD_LINES)
        self._watchers[queue] = client_id
        self._send(Watch(client_id, True, op_period, op_interval_s, with_text))
        try:
            has_header = False
            while queue in self._watchers or not queue.empty():
                try:
                    data = await asyncio.wait_for(queue.get(), WATCH_PAUSE_S)
                except TimeoutError:
                    data = b""
                has_header = has_header or data.startswith(b'{"quire_trace"')
                if not data or has_header:  # lines for an earlier watcher may come before
                    yield data
        finally:
            self._watchers.pop(queue, None)
            if client_id not in self._watchers.values() and self.dead_error is None:
                self._send(Watch(client_id, False))

    def tell_watchers(self, client_id: str, make_line: Callable[[], bytes]) -> None:
        """Send a line to the watchers of a client, if there are some."""
        if client_id in self._watchers.values():
            self._received_lines(client_id, make_line())

    def _received_lines(self, client_id: str | None, data: bytes) -> None:
        for queue in [queue for queue, watcher in self._watchers.items() if watcher == client_id]:
            if queue.full():
                del self._watchers[queue]
            else:
                queue.put_nowait(data)

    def check_alive(self) -> None:
        """Raises: EngineDeadError if it takes no requests."""
        if self.dead_error is not None:
            raise EngineDeadError(self.dead_error.message)
        if self.ready is None:
            raise EngineDeadError("the engine is not ready yet: try again in a moment")

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    # --- Called by the event loop --------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Handle the messages that `data` completes."""
        self.last_heard_s = asyncio.get_running_loop().time()
        for body in self._reader.feed(data):
            self._received(self._decoder.decode(body))

    def _received(self, message: FromEngine) -> None:
        if isinstance(message, Updates):
            self.statistics = message.statistics
            self.prefixes.apply(message.cached, message.evicted)
            self.progress_s = self.last_heard_s
            for update in message.updates:
                stream = self._streams.get(update.request_id)
                if stream is not None:
                    if update.finished:
                        del self._streams[update.request_id]
                    stream.put(update)
                    if stream.is_cut:
                        self.abort(stream)
        elif isinstance(message, Lines):
            self._received_lines(message.client_id, message.data)
        elif isinstance(message, Heartbeat):
            pass  # `last_heard_s` is set
        elif self._starting is not None and not self._starting.done():
            if isinstance(message, Ready):
                self._starting.set_result(message)
            else:
                self._starting.set_exception(message.failure.revive())

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all waiting coroutines: the process has ended, or was told to."""
        what = "was shut down" if self._is_stopping else "ended unexpectedly"
        error = self.dead_error = EngineDeadError(f"the engine process {what}; the request was not completed")
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(error.message))
        for queue in tuple(self._watchers):
            del self._watchers[queue]
            if queue.empty():
                queue.put_nowait(b"")  # wakes its reader
        if not self._is_stopping:
            self._reaping = asyncio.ensure_future(self._reap())  # held, or it could be collected before its end
            if self._on_death is not None:
                self._on_death(error)


def describe_status(status: int) -> str:
    """Return what a process of this exit status did."""
    if status >= 0:
        return f"exited with status {status}"
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name} ({-status}){hint}"
