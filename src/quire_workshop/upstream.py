"""`Upstream`: the connections on which a server gets its requests, and `UpstreamAnswer`, what comes back on one.

HTTP/1.1 over asyncio, parsed by httptools: httpx2 costs several times as much per request and per piece of a stream.
Failures are httpx2's errors. Next to read: `load_client.py`.
"""

import asyncio
import contextlib
import socket
from urllib.parse import urlsplit

import httptools
import httpx2

CONNECT_S = 2.0
KEEP_ALIVE_S = 20.0
"""Shorter than a server's, so that no request meets a connection that the server is closing."""
MAX_HELD_BYTES = 64 << 10
"""Bytes of an answer that wait for a slow client; the others wait at the server."""
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]
"""An answer from a machine that has vanished ends with an error after 25 s."""


class UpstreamAnswer(asyncio.Protocol):
    """An answer whose body is read as it comes, on a connection of its own. `first`: the first bytes of the body."""

    def __init__(self, upstream: "Upstream") -> None:
        self._upstream = upstream
        self._waiter: asyncio.Future[None] | None = None

    def begin(self, request: bytes, is_head: bool) -> None:
        """Send a request. `is_head`: its answer has no body, whatever the headers say."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.first = b""
        self._is_head, self._is_complete, self._ends_with_connection = is_head, False, False
        self._pieces: list[bytes] = []
        self._num_held = 0
        self._error: httpx2.TransportError | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    @property
    def is_stream(self) -> bool:
        """Return whether it is a stream of events."""
        return dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream")

    @property
    def is_read(self) -> bool:
        """Return whether it has come to its end, and all of it has been read."""
        return self._is_complete and not self._pieces

    async def read(self) -> bytes:
        """Return all bytes that have come; none at the end. Raises: httpx2.TransportError if it ends before that."""
        while not self._pieces and not self._is_complete:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._num_held > MAX_HELD_BYTES:
            self._transport.resume_reading()
        self._num_held = 0
        return data

    def fail(self, error: httpx2.TransportError) -> None:
        """End it: `read` raises the error once it has returned what has come."""
        if not self._is_complete and self._error is None:
            self._error = error
        self._transport.abort()
        self._wake()

    def close(self) -> None:
        """Leave the connection to the next request. If it has not come to its end, the server aborts the request."""
        if self._is_complete and not self._ends_with_connection and not self._transport.is_closing():
            self._upstream.keep(self)
        else:
            self._transport.abort()

    @property
    def is_usable(self) -> bool:
        """Return whether the connection may get another request."""
        return not self._transport.is_closing()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- What asyncio and the parser call -------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the socket."""
        self._transport = transport
        with contextlib.suppress(OSError):
            for option in SOCKET_OPTIONS:
                transport.get_extra_info("socket").setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        """Parse some bytes. Bytes that belong to no answer end the connection."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return self.fail(httpx2.RemoteProtocolError(f"no valid HTTP/1.1: {error}"))
        self._wake()

    def eof_received(self) -> None:
        """End an answer whose end is that of the connection; another one has failed."""
        if self._ends_with_connection and self.status and not self._is_head:
            self._is_complete = True
        self.fail(httpx2.RemoteProtocolError("the connection ended before the answer"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what has not come to its end."""
        self.fail(httpx2.ReadError(str(exc or "the connection is closed")))

    def on_message_begin(self) -> None:
        """Refuse an answer to no request. Raises: HttpParserError."""
        if self._is_complete:
            raise httptools.HttpParserError("unexpected answer")
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; one after the body is dropped."""
        if not self.status:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the status; those of 100 to 199 come before the answer."""
        status = self._parser.get_status_code()
        if status < 200:
            return
        self.status = status
        names = {name for name, _ in self.headers}
        self._ends_with_connection = self._is_head or names.isdisjoint((b"content-length", b"transfer-encoding"))
        self._is_complete = self._is_head

    def on_body(self, body: bytes) -> None:
        """Take a piece; stop reading if too much waits."""
        self._pieces.append(body)
        was_paused = self._num_held > MAX_HELD_BYTES
        self._num_held += len(body)
        if self._num_held > MAX_HELD_BYTES and not was_paused:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """Note the end."""
        if self.status:
            self._is_complete = True
            self._ends_with_connection = self._is_head or not self._parser.should_keep_alive()


class Upstream:
    """The connections to a server. `key`: the API key that it gets."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self._host, self._is_tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        self._head += "" if key is None else f"Authorization: Bearer {key}\r\n"
        self._tls = httpx2.create_ssl_context() if self._is_tls else None
        self._idle: list[tuple[float, UpstreamAnswer]] = []
        self._is_closed = False

    async def begin(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> UpstreamAnswer:
        """Send a request. Returns: its answer, of which nothing has come yet. Raises: httpx2.TransportError."""
        lines = [b"%b: %b\r\n" % item for item in headers]
        if body or method in ("POST", "PUT", "PATCH"):
            lines.append(b"Content-Length: %d\r\n" % len(body))
        answer = await self._connection()
        head = b"%b %b HTTP/1.1\r\n%b" % (method.encode(), target, self._head.encode())
        answer.begin(b"".join((head, *lines, b"\r\n", body)), method == "HEAD")
        return answer

    async def _connection(self) -> UpstreamAnswer:
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0][0] < loop.time() - KEEP_ALIVE_S:
            self._idle.pop(0)[1].fail(httpx2.ReadError("idle"))
        while self._idle:
            if (answer := self._idle.pop()[1]).is_usable:
                return answer
        try:
            async with asyncio.timeout(CONNECT_S):
                return (
                    await loop.create_connection(lambda: UpstreamAnswer(self), self._host, self._port, ssl=self._tls)
                )[1]
        except TimeoutError:
            raise httpx2.ConnectTimeout(f"no connection within {CONNECT_S} s") from None
        except OSError as error:
            raise httpx2.ConnectError(str(error)) from error

    def keep(self, answer: UpstreamAnswer) -> None:
        """Keep a connection for another request."""
        if self._is_closed:
            return answer.fail(httpx2.ReadError("closed"))
        self._idle.append((asyncio.get_running_loop().time(), answer))

    def close(self) -> None:
        """Close the idle connections; those in use close after their answers."""
        self._is_closed = True
        for _, answer in self._idle:
            answer.fail(httpx2.ReadError("closed"))
        self._idle.clear()
