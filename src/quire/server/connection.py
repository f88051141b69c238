"""One HTTP connection: uvicorn's protocol over httptools, with the limits that it lacks.

A client may send so many bytes of headers, take so long to send a request and so long to read its answer; whoever
exceeds that is cut off, and has cost no more than a few hundred KiB. Times are of the event loop's monotonic clock.
Next to read: `refusals.py`, `delivery.py`, then `gate/__init__.py`, which sees requests once their headers are there.
"""

import asyncio
import contextlib
import re
import resource
import socket
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server import refusals
from quire.server.delivery import Delivery
from quire.server.gate import Gate
from quire.server.refusals import Refusal

MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_URL_BYTES = 8 << 10
MAX_CHUNKS = 8192
MAX_FRAMING_BYTES = 512 << 10
"""Bytes of a request that are not its body: headers, sizes of chunks, what stands behind these, trailers."""
MAX_PIPELINED = 16
WRITE_BUFFER_BYTES = 32 << 10
SOCKET_BUFFER_BYTES = 96 << 10
"""The kernel doubles it for its own bookkeeping; with the buffer above, less than 256 KiB wait for a slow reader."""
_END_OF_PATH = re.compile("[?#]")
_SPARE_FILES = 64
_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_CONNECTIONS = max(16, min(4096, _OPEN_FILES - _SPARE_FILES if _OPEN_FILES > 0 else 4096))


class Connection(HttpToolsProtocol):
    """Refuses what is too large, too slow or ambiguous; everything else is uvicorn's."""

    READ_TIMEOUT_S = 15.0
    """For headers and body together, from the first byte; and for the first byte of a new connection."""
    WRITE_TIMEOUT_S = 60.0
    """A reader who has not caught up for so long with an answer that is still being made is cut off."""
    TAKE_TIMEOUT_S = 15.0
    """So is one who in so long takes less than 4 KiB of a finished answer that waits for him."""
    KEEP_ALIVE_S = 30
    LINGER_S = 2.0
    """How long input is thrown away after a refusal: a socket closed with input unread loses the answer too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.app, Gate)
        self._gate = self.app
        self.timeout_keep_alive = self.KEEP_ALIVE_S
        self._refusal: Refusal | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._delivery: Delivery
        self._linger_timer: asyncio.TimerHandle | None = None
        self._next: RequestResponseCycle | None = None
        self._is_feeding = False
        self._is_deaf = False
        self._is_in_headers = True
        self._is_in_body = False
        self._is_in_message = False
        self._has_head = False
        self._framing_bytes = 0
        self._header_bytes = 0
        self._num_chunks = 0

    # --- The connection comes and goes ----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._delivery = Delivery(
            transport, self.loop, unfinished_s=self.WRITE_TIMEOUT_S, finished_s=self.TAKE_TIMEOUT_S
        )
        connected = transport.get_extra_info("socket")
        if connected is not None:
            with contextlib.suppress(OSError):
                # asyncio does so only where the listening socket names its protocol. Without it the first token on a
                # connection that is used again waits 40 ms for the client to acknowledge the headers.
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(refusals.TOO_MANY_CONNECTIONS)
        else:
            self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_read_timer()
        self._delivery.stop()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # --- Reading --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request. Never raises, whatever they are."""
        if self._is_deaf or self.parser is None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._is_feeding = True
        self._feed(data)
        self._is_feeding = False
        self._begin()

    def _feed(self, data: bytes) -> None:
        if self._read_timer is None and (self._is_in_headers or self._is_in_body):
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
            self._refuse(self._refusal or refusals.MALFORMED)
            return
        self._watch_reading()
        if self._is_in_headers and self._framing_bytes > MAX_HEADER_BYTES:
            self._refuse(refusals.HEADERS_TOO_LARGE)
        elif self._framing_bytes > MAX_FRAMING_BYTES:
            self._refuse(refusals.TOO_MANY_CHUNKS)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._delivery.ask()
        self._is_in_headers = self._is_in_message = True
        self._has_head = False
        self._framing_bytes = self._header_bytes = self._num_chunks = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the URL."""
        if len(self.url) + len(url) > MAX_URL_BYTES:
            self._stop(refusals.URL_TOO_LONG)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; those that come after the body are counted and dropped."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            self._stop(refusals.HEADERS_TOO_LARGE)
        if self._is_in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The application hears of the request, unless something in its headers is ambiguous."""
        self._has_head = True
        self._check_headers()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(refusals.MALFORMED)
        super().on_headers_complete()
        self._is_in_headers = False
        self._is_in_body = True

    def on_chunk_header(self) -> None:
        """A chunk of the body begins."""
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            self._stop(refusals.TOO_MANY_CHUNKS)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        self._stop_read_timer()
        self._is_in_body = self._is_in_message = False
        self._is_in_headers = True
        self._framing_bytes = 0
        super().on_message_complete()

    def _check_headers(self) -> None:
        names = [name for name, _ in self.headers]
        num_lengths, num_encodings = names.count(b"content-length"), names.count(b"transfer-encoding")
        if num_lengths + num_encodings > 1:
            self._stop(refusals.BAD_LENGTH)
        if num_encodings and dict(self.headers)[b"transfer-encoding"].strip().lower() != b"chunked":
            self._stop(refusals.BAD_ENCODING)
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop(refusals.MALFORMED)
        if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
            self._stop(refusals.BAD_HOST)

    def _stop(self, refusal: Refusal) -> None:
        """Out of a callback of the parser. Raises: HttpParserError."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.code)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer and close; without an answer where one to an earlier request is still owed or under way."""
        if self.transport.is_closing():
            return
        named = self._gate.note_refusal(self._refused_scope(), refusal.status)
        if self._owes_answer():
            self.transport.abort()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self.transport.write(refusal.response(named))
        self._linger()

    def _refused_scope(self) -> Scope:
        """What is known of the request that is being read, as far as it may be written down."""
        if self._is_in_message and "path" in self.scope:
            return self.scope  # type: ignore[return-value]
        scope: Scope = {"method": "-", "path": "-", "headers": []}
        # A key that stands in the path is known as one only by the header that may still be missing.
        if self._is_in_message and self._has_head:
            scope["method"] = self.parser.get_method().decode("ascii")
            scope["headers"] = self.headers
            if self.url.startswith(b"/"):
                scope["path"] = unquote(_END_OF_PATH.split(self.url.decode("latin-1"), maxsplit=1)[0])
        return scope

    def _owes_answer(self) -> bool:
        """Whether a request that came completely is not yet answered completely, or an answer has begun."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return bool(self.pipeline)
        return bool(self.pipeline) or cycle.response_started or not self._is_in_body

    def _linger(self) -> None:
        self._is_deaf = True
        self._stop_read_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(self.LINGER_S, self.transport.abort)

    def _watch_reading(self) -> None:
        """The next request may begin in the same piece of input as the last one ended in."""
        if self._is_in_message and self._read_timer is None and not self._is_deaf:
            self._start_read_timer()

    def _start_read_timer(self) -> None:
        self._read_timer = self.loop.call_later(self.READ_TIMEOUT_S, self._on_read_timeout)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_read_timeout(self) -> None:
        self._read_timer = None
        # Stray bytes behind a request must not cost its answer; once that is out, the keep-alive time runs.
        if not self._owes_answer():
            self._refuse(refusals.TIMED_OUT)

    # --- Answering ------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # Not now: it is not known yet whether the body came together with the head.
        self._next = cycle
        if not self._is_feeding:
            self.loop.call_soon(self._begin)

    def _begin(self) -> None:
        """If it is a request's turn: what the gate refuses is answered here; all else by a task."""
        cycle, self._next = self._next, None
        if cycle is None:
            return
        refused = None
        if not (cycle.disconnected or self.flow.write_paused):
            refused = self._gate.refusal(cycle.scope)  # type: ignore[arg-type]
        if refused is None:
            super()._start_asgi_task(cycle, self.app)
            return
        error, headers = refused
        is_unread = self._is_in_body and cycle is self.cycle
        closes = not cycle.keep_alive or is_unread or "Connection" in error.extra_headers
        has_body = cycle.scope["method"] != "HEAD"
        headers = [*cycle.default_headers, *headers]
        self.transport.write(refusals.whole_answer(error, headers, closes=closes, has_body=has_body))
        cycle.response_started = cycle.response_complete = True
        if closes and not is_unread:
            self.transport.close()
        self.on_response_complete()
        cycle.on_response = lambda: None  # else it and this connection would keep each other

    # --- Writing --------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client reads more slowly than the application writes."""
        super().pause_writing()
        self._delivery.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._delivery.resume()

    def on_response_complete(self) -> None:
        """The answer is written, but perhaps not read; or the request was refused before it was read."""
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._linger()
        self._watch_reading()
        self._delivery.finish()
