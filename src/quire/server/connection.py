"""HTTP connection: uvicorn's protocol over httptools, with limits on size, time and number.

Next to read: `gate.py`, which sees a request once its headers are complete.
"""

import asyncio
import contextlib
import enum
import logging
import resource
import socket
import struct
from collections import OrderedDict
from functools import partial
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.server.errors import ApiError
from quire.server.gate import OPEN_PATHS, Gate

LOGGER = logging.getLogger("quire.server")

MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_URL_BYTES = 8 << 10
MAX_FRAMING_BYTES = 64 << 10
"""Bytes of a request outside its body: headers, sizes and extensions of chunks, trailers. With chunks of 1 KiB a body
of 4 MiB needs 32 KiB."""
MAX_PIPELINED = 16
SOCKET_BUFFER_BYTES = 48 << 10
"""The kernel doubles it. With pieces of `sending.py` in the transport and in a task, and the engine's updates that wait
in `engine/process/stream.py`, less than 256 KiB wait for a slow reader."""
READ_BYTES = 32 << 10
"""Most bytes that are read of a connection before the gate has looked at the head of its request."""
MAX_REST_BYTES = 64 << 10
"""Bytes of a refused body after which the rest is not awaited: only small ones are read so that connections stay."""
ACCEPTED_AT_ONCE = 32
"""Connections that the event loop accepts in one iteration; further ones wait in the kernel."""
SPARE_FILES = 4 * ACCEPTED_AT_ONCE + 64
"""Files that connections leave free: it takes four iterations from one that is accepted to the one closed for it."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing drops what the kernel still holds for a client that does not read."""

MALFORMED = ApiError(400, "this is not valid HTTP/1.1", code="malformed_request")
BAD_ENCODING = ApiError(400, "the only Transfer-Encoding understood here is chunked", code="malformed_request")
BAD_HOST = ApiError(400, "a request has one Host header", code="malformed_request")
TOO_MANY_CHUNKS = ApiError(400, "the body comes in too many small chunks: send larger ones", code="too_many_chunks")
TIMED_OUT = ApiError(408, "the request did not arrive completely in time", code="request_timeout")
URL_TOO_LONG = ApiError(414, f"the URL is longer than {MAX_URL_BYTES} bytes", code="url_too_long")
HEADERS_TOO_LARGE = ApiError(
    431, f"the headers are more than {MAX_HEADERS}, or larger than {MAX_HEADER_BYTES} bytes", code="headers_too_large"
)
TOO_MANY_CONNECTIONS = ApiError(
    503, "the server has too many connections: try again later", code="too_many_connections", retry_after_s=2
)


class Rank(enum.IntEnum):
    """State in which a new connection may replace one."""

    NO_HEAD = 0
    NO_BODY = 1
    IDLE = 2
    UNREAD = 3
    """The client has not read its whole answer."""


class Places(ServerState):
    """The state of uvicorn's server, and its connections that new ones may replace, by rank, oldest first."""

    PATIENCE_S = 1.0
    """Time that the beginning of a request has before idle connections are closed in its place."""
    WARNING_S = 60.0
    """At most one line about replaced connections is logged within this time."""

    def __init__(self) -> None:
        super().__init__()
        self._by_rank = {rank: OrderedDict[Connection, float]() for rank in Rank}
        self._ranks: dict[Connection, Rank] = {}
        self._next_warning_s = 0.0

    def put(self, connection: "Connection", rank: Rank | None, now_s: float) -> None:
        """Note the rank of a connection, None while it must stay. Its age counts from the last change."""
        before = self._ranks.pop(connection, None)
        if before is not None and before is not rank:
            del self._by_rank[before][connection]
        if rank is not None:
            self._ranks[connection] = rank
            self._by_rank[rank].setdefault(connection, now_s)

    def find(self, now_s: float) -> "Connection | None":
        """Return the connection that a new one replaces, which logs a line; None if all must stay."""
        for rank, age_s in (
            *((rank, self.PATIENCE_S) for rank in (Rank.NO_HEAD, Rank.NO_BODY)),
            *((rank, 0.0) for rank in (Rank.IDLE, Rank.NO_HEAD, Rank.NO_BODY, Rank.UNREAD)),
        ):
            for connection, since_s in self._by_rank[rank].items():
                if now_s - since_s < age_s:
                    break
                if rank is not Rank.IDLE and now_s >= self._next_warning_s:
                    self._next_warning_s = now_s + self.WARNING_S
                    LOGGER.warning(
                        "%d connections are too many: new ones replace incomplete ones", len(self.connections)
                    )
                return connection
        return None


class Connection(HttpToolsProtocol):
    """Refuses requests that are too large, too slow or ambiguous; everything else is uvicorn's."""

    MAX_CONNECTIONS = 4096
    PROBE_PLACES = 64
    """Of these, for connections that send nothing but probes: they are there when all others run requests."""
    READ_TIMEOUT_S = 15.0
    """For headers and body together, from the first byte; and for the first byte of a new connection."""
    WRITE_TIMEOUT_S = 60.0
    """A client that reads none of an unfinished answer for so long is disconnected: people pause streams."""
    TAKE_TIMEOUT_S = 15.0
    """The same for a finished answer."""
    KEEP_ALIVE_S = 30
    LINGER_S = 2.0
    """Time that input is discarded after a refusal: a socket closed with input unread loses the answer too."""
    REST_S = 0.25
    """Time that the rest of a body has to arrive before its refusal says that the connection ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.app, Gate)
        assert isinstance(self.server_state, Places)
        self._gate, self._places = self.app, self.server_state
        self._is_for_probes = False
        self._answering: RequestResponseCycle | None = None
        self.timeout_keep_alive = self.KEEP_ALIVE_S
        self._refusal: ApiError | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_deaf = False
        self._is_in_body = False
        self._is_in_message = False
        self._framing_bytes = 0
        self._header_bytes = 0

    # --- The connection comes and goes ----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the socket. One connection too many replaces another one, or may only probe, or is refused."""
        super().connection_made(transport)
        # The client has read everything whenever writing is not paused.
        transport.set_write_buffer_limits(high=0)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        connected = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            # asyncio does so only where the listening socket names its protocol. Without it the first token on a
            # connection that is used again waits 40 ms for the client to acknowledge the headers.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._start_read_timer()
        most = self._max_connections()
        if len(self.connections) > most - min(self.PROBE_PLACES, most // 8):
            replaced = self._places.find(self.loop.time())
            if replaced is not None:
                replaced.drop()
            elif len(self.connections) > most:
                return self._refuse(TOO_MANY_CONNECTIONS)
            else:
                self._is_for_probes = True
        self._note_rank()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        for name in [*self._timers]:
            self._stop_timer(name)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._places.put(self, None, 0.0)

    def drop(self) -> None:
        """End the connection for the sake of another one."""
        self._places.put(self, None, 0.0)
        self.transport.abort()

    @property
    def rank(self) -> Rank | None:
        """Return the state in which a new connection may replace it; None while a request is computed or answered."""
        if self._is_deaf:
            return Rank.NO_HEAD
        if self.cycle is not None and not self.cycle.response_complete:
            if self._is_in_body and not (self.pipeline or self.cycle.response_started):
                return Rank.NO_BODY
            return Rank.UNREAD if "write" in self._timers and self._is_answer_made else None
        if self._is_in_message or self.cycle is None:
            return Rank.NO_HEAD
        return Rank.UNREAD if "write" in self._timers else Rank.IDLE

    def _note_rank(self) -> None:
        self._places.put(self, self.rank, self.loop.time())

    def _max_connections(self) -> int:
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self.MAX_CONNECTIONS if num_files < 0 else min(self.MAX_CONNECTIONS, max(16, num_files - SPARE_FILES))

    # --- Reading --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse some bytes of a request. Never raises, whatever they are."""
        if self._is_deaf or self.parser is None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if "read" not in self._timers:
            self._start_read_timer()
        self._framing_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # No other protocol is spoken here: the answer is an ordinary one, and what follows cannot be read.
            self._is_deaf = True
            if self.cycle is not None:
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse(self._refusal or MALFORMED)
            return
        self._watch_reading()
        if not self._is_in_body and self._framing_bytes > MAX_HEADER_BYTES:
            self._refuse(HEADERS_TOO_LARGE)
        elif self._framing_bytes > MAX_FRAMING_BYTES:
            self._refuse(TOO_MANY_CHUNKS)

    def on_message_begin(self) -> None:
        """Reset the state of the request."""
        super().on_message_begin()
        self._is_in_message = True
        self._header_bytes = 0
        self._note_rank()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the URL."""
        if len(self.url) + len(url) > MAX_URL_BYTES:
            self._stop(URL_TOO_LONG)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a header after the body is counted and dropped."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            self._stop(HEADERS_TOO_LARGE)
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, unless the headers are ambiguous."""
        names = [name for name, _ in self.headers]
        encodings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        version = self.parser.get_http_version()
        # The parser itself refuses two lengths, and a length beside an encoding.
        if encodings not in ([], [b"chunked"]):
            self._stop(BAD_ENCODING)
        if version not in ("1.0", "1.1") or len(self.pipeline) >= MAX_PIPELINED:
            self._stop(MALFORMED)
        if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
            self._stop(BAD_HOST)
        if self._is_for_probes and self.url.partition(b"?")[0].decode("latin-1") not in OPEN_PATHS:
            self._stop(TOO_MANY_CONNECTIONS)
        super().on_headers_complete()
        self._is_in_body = True
        self._note_rank()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the time limit: the request is complete."""
        self._stop_timer("read")
        self._is_in_body = self._is_in_message = False
        self._framing_bytes = 0
        super().on_message_complete()
        self._note_rank()

    def _stop(self, refusal: ApiError) -> None:
        """Leave a callback of the parser. Raises: HttpParserError."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.code)

    def _refuse(self, refusal: ApiError) -> None:
        """Answer and close; close without an answer where an earlier one is owed or under way."""
        if self.transport.is_closing():
            return
        is_parsed = self._is_in_message and "path" in self.scope
        scope: Scope = self.scope if is_parsed else {"method": "-", "path": "-", "headers": []}  # type: ignore[assignment]
        headers = self._gate.note_refusal(scope, refusal.status)
        if self._owes_answer():
            self.transport.abort()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self.transport.write(whole_answer(refusal, headers))
        self._linger()

    def _owes_answer(self) -> bool:
        """Return True if a complete request has no complete answer yet, or an answer has begun."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return bool(self.pipeline)
        return bool(self.pipeline) or cycle.response_started or not self._is_in_body

    def _linger(self) -> None:
        self._is_deaf = True
        self._note_rank()
        self._stop_timer("read")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timers["linger"] = self.loop.call_later(self.LINGER_S, self.transport.abort)

    def _watch_reading(self) -> None:
        """Start the time limit of a request that begins in the piece of input where the last one ended."""
        if self._is_in_message and "read" not in self._timers and not self._is_deaf:
            self._start_read_timer()

    def _start_read_timer(self) -> None:
        self._timers["read"] = self.loop.call_later(self.READ_TIMEOUT_S, self._on_read_timeout)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _on_read_timeout(self) -> None:
        del self._timers["read"]
        # Stray bytes behind a request must not cost its answer; once that is out, the keep-alive time runs.
        if not self._owes_answer():
            self._refuse(TIMED_OUT)

    # --- Writing --------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Start the time limit of a client that reads more slowly than the application writes."""
        super().pause_writing()
        if "write" not in self._timers:
            self._start_write_timer(self.TAKE_TIMEOUT_S if self._is_answer_made else self.WRITE_TIMEOUT_S)
        self._note_rank()

    def resume_writing(self) -> None:
        """Stop the time limit: the client has read everything."""
        super().resume_writing()
        self._stop_timer("write")
        self._note_rank()

    def on_response_complete(self) -> None:
        """Limit the time to read the answer; discard the rest of a request that was answered before it was read."""
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._linger()
        self._watch_reading()
        if "write" in self._timers:
            self._stop_timer("write")
            self._start_write_timer(self.TAKE_TIMEOUT_S)
        self._note_rank()

    @property
    def _is_answer_made(self) -> bool:
        """Return True if an answer of known length is being written: all of it is there."""
        return self._answering is not None and self._answering.chunked_encoding is False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, partial(_answer, self, cycle, app))

    def _start_write_timer(self, timeout_s: float) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        self._timers["write"] = self.loop.call_later(timeout_s, self._on_write_timeout, timeout_s, num_unsent)

    def _on_write_timeout(self, timeout_s: float, num_unsent: int) -> None:
        if self.transport.get_write_buffer_size() < num_unsent:
            return self._start_write_timer(timeout_s)
        with contextlib.suppress(OSError):
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.transport.abort()


async def _answer(
    connection: Connection, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Call the application. An answer that is made before the body has arrived waits for the rest of the body, which
    is discarded; if that is large or does not come in time, the answer says that the connection ends."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start" and cycle.more_body:
            num_bytes = 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(connection.REST_S):
                    # A client that has asked whether to send the body does not send it after a refusal.
                    while (
                        cycle.more_body
                        and num_bytes <= MAX_REST_BYTES
                        and not (cycle.disconnected or cycle.waiting_for_100_continue)
                    ):
                        await cycle.message_event.wait()
                        cycle.message_event.clear()
                        num_bytes += len(cycle.body)
                        cycle.body.clear()
                        connection.flow.resume_reading()
            if cycle.more_body:
                connection._is_deaf = True
                cycle.keep_alive = False  # the answer says so
                await send(message)
                cycle.keep_alive = True  # `_linger` ends the connection: input may be unread
                return
        await send(message)

    await app(scope, receive, send_head)


def whole_answer(error: ApiError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Encode an error as a whole answer of HTTP, after which the connection ends."""
    body = msgspec.json.encode(error.body())
    found = {"content-type": "application/json", "content-length": len(body), "connection": "close"} | error.headers()
    lines = [
        *(f"{name}: {value}\r\n".encode() for name, value in found.items()),
        *(b"%b: %b\r\n" % item for item in headers),
    ]
    return b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body))
