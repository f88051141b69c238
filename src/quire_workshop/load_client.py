"""Load on a server and the answers of its clients: closed loop (clients at once) or open (requests per second).

A client must not take the processor from the server that it measures, so it uses connections of its own, which cost
a fraction of httpx2's: HTTP/1.1 over asyncio, parsed by httptools; failures are httpx2's errors. In a closed loop each
client sends its next request when its last is answered; in an open loop requests come with exponential gaps from a
seed. Next to read: `cli/bench_serve.py`.
"""

import asyncio
import contextlib
import itertools
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import httpx2
import msgspec

from quire.cli.server_client import StreamedAnswer, base_url, errors_named

# --- Connections ----------------------------------------------------------------------------------

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


# --- Clients --------------------------------------------------------------------------------------

HEADERS = [(b"Content-Type", b"application/json"), (b"Accept", b"text/event-stream")]
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A server's address, and a path of its API. `key` may be empty."""

    url: str
    path: str
    key: str = ""


class StreamClient:
    """Requests to one path of a server, each on a connection that no other uses at the time."""

    def __init__(self, endpoint: LoadTarget) -> None:
        """Raises: ServerUnreachableError if the endpoint's URL is no address."""
        self._url = base_url(endpoint.url)
        self._upstream = Upstream(self._url, endpoint.key or None)
        self._target = (urlsplit(self._url).path + endpoint.path).encode()

    async def ask(self, body: Body) -> StreamedAnswer:
        """Send one body and read its answer to the end. Raises: ServerUnreachableError if nothing listens there."""
        answer, rest = StreamedAnswer(time.perf_counter()), b""
        with errors_named(self._url):
            received = await self._upstream.begin("POST", self._target, HEADERS, msgspec.json.encode(body))
        try:
            while data := await received.read():
                rest += data
                if received.is_stream:
                    *lines, rest = rest.split(b"\n")
                    _take(lines, answer)
            if not received.is_stream:
                answer.error = rest[:500].decode("utf-8", "replace")
        except httpx2.TransportError as error:
            answer.error = answer.error or str(error)
        received.close()
        answer.status, answer.ended_s = received.status, time.perf_counter()
        # Servers that do not count their tokens send one at a time.
        answer.num_tokens = answer.num_tokens or len(answer.chunk_times)
        return answer

    def close(self) -> None:
        """Close the connections."""
        self._upstream.close()


def _take(lines: Sequence[bytes], answer: StreamedAnswer) -> None:
    """Add complete lines of a stream to its answer; comments and blank lines are skipped. Mutates: answer."""
    for line in lines:
        data = line[5:].strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            event = msgspec.json.decode(data)
            answer.take(event, time.perf_counter())
            if error := event.get("error"):
                answer.error = str(error.get("message"))


@dataclass(frozen=True, slots=True)
class Load:
    """Clients at once, or requests per second; one of them."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """Return its cell in the table."""
        if self.concurrency is None:
            return f"{self.rate:g} req/s"
        return f"{self.concurrency} client{'' if self.concurrency == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All answers of one load, and how long it took."""

    load: Load
    answers: tuple[StreamedAnswer, ...]
    duration_s: float

    @property
    def good(self) -> list[StreamedAnswer]:
        """Answers that are complete."""
        return [answer for answer in self.answers if answer.error is None and answer.chunk_times]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of complete answers per second."""
        return sum(answer.num_tokens for answer in self.good) / self.duration_s

    def values_ms(self, metric: str) -> list[float]:
        """Return all values of "ttft", "itl" (gaps between pieces of text) or "e2e", in milliseconds."""
        if metric == "itl":
            gaps = [itertools.pairwise(answer.chunk_times) for answer in self.good]
            return [1e3 * (later - earlier) for earlier, later in itertools.chain.from_iterable(gaps)]
        if metric == "ttft":
            return [1e3 * answer.time_to_first_s for answer in self.good]
        return [1e3 * (answer.ended_s - answer.started_s) for answer in self.good]

    def percentile_ms(self, metric: str, percent: int) -> float:
        """Return a percentile of a metric; NaN without complete answers."""
        return percentile(self.values_ms(metric), percent)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the percentile by nearest rank; NaN of no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def put_load(endpoint: LoadTarget, load: Load, bodies: Sequence[Body], *, seed: int = 0) -> LoadResult:
    """Send all bodies. Raises: ServerUnreachableError if there is no server."""
    started = time.perf_counter()
    answers = asyncio.run(_ask_all(endpoint, load, bodies, seed))
    return LoadResult(load, tuple(answers), time.perf_counter() - started)


async def _ask_all(endpoint: LoadTarget, load: Load, bodies: Sequence[Body], seed: int) -> list[StreamedAnswer]:
    gaps, client = random.Random(seed), StreamClient(endpoint)
    slots = asyncio.Semaphore(load.concurrency or len(bodies))

    async def ask(body: Body) -> StreamedAnswer:
        async with slots:
            return await client.ask(body)

    tasks: list[asyncio.Task[StreamedAnswer]] = []
    try:
        for body in bodies:
            if load.rate is not None and tasks:
                await asyncio.sleep(gaps.expovariate(load.rate))
            tasks.append(asyncio.create_task(ask(body)))
        return list(await asyncio.gather(*tasks))
    finally:
        client.close()


def highest_rate(holds: Callable[[float], bool], first: float, *, num_halvings: int = 3) -> float:
    """Return the highest rate that `holds`, found by doubling, then bisection; 0 if not even `first / 16` holds."""
    low, high = 0.0, first
    while holds(high):
        low, high = high, high * 2
    while low == 0.0 and high > first / 16:
        high /= 2
        if holds(high):
            low, high = high, high * 2
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if low and holds(middle) else (low, middle if low else high)
    return low
