"""Load on a server and the answers of its clients: closed loop (clients at once) or open (requests per second).

A client must not take the processor from the server that it measures: HTTP/1.1 over asyncio streams, parsed by
httptools, costs 59 µs per event, httpx2 160 µs. In a closed loop each client sends its next request when its last is
answered; in an open loop requests come with exponential gaps from a seed. Next to read: `bench_serve.py`.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from quire.cli.server_client import Answer, ServerUnreachableError, base_url

READ_BYTES = 1 << 16
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and path of a server's API. `key` may be empty."""

    host: str
    port: int
    path: str
    key: str = ""

    @classmethod
    def parse(cls, url: str, path: str, key: str = "") -> "Endpoint":
        """Make it from a server's address. Raises: ServerUnreachableError."""
        parts = urlsplit(base_url(url))
        if parts.scheme != "http" or parts.hostname is None:
            raise ServerUnreachableError(f"--url {url!r}: load is put on plain HTTP only: http://host:port")
        return cls(parts.hostname, parts.port or 80, parts.path + path, key)


class StreamClient:
    """Sends one request after the other over one connection."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: Body) -> Answer:
        """Send one body and read its answer to the end. Raises: ServerUnreachableError."""
        if self._streams is None or self._streams[1].is_closing():
            self._streams = await _connect(self._endpoint)
        reader, writer = self._streams
        answer = Answer(time.perf_counter())
        response = _Response(answer)
        parser = httptools.HttpResponseParser(response)
        writer.write(self._request(msgspec.json.encode(body)))
        while not response.is_complete:
            data = await reader.read(READ_BYTES)
            if not data:
                answer.error = answer.error or "the server closed the connection"
                break
            try:
                parser.feed_data(data)
            except httptools.HttpParserError:
                self.close()
                raise ServerUnreachableError(f"no HTTP server at {self._endpoint.host}:{self._endpoint.port}") from None
        answer.ended_s = time.perf_counter()
        answer.status = parser.get_status_code()
        # Servers that do not count their tokens send one at a time.
        answer.num_tokens = answer.num_tokens or len(answer.chunk_times)
        if answer.error is not None or not response.keeps_alive:
            self.close()
        return answer

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    def _request(self, body: bytes) -> bytes:
        where = self._endpoint
        key = f"Authorization: Bearer {where.key}\r\n" if where.key else ""
        head = (
            f"POST {where.path} HTTP/1.1\r\nHost: {where.host}:{where.port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n{key}\r\n"
        )
        return head.encode() + body


async def _connect(endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(endpoint.host, endpoint.port)
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror or error
        where = f"{endpoint.host}:{endpoint.port}"
        raise ServerUnreachableError(f"no server at {where}: {reason}; start one with `quire serve`") from None


class _Response:
    """httptools' callbacks: collects one answer."""

    def __init__(self, answer: Answer) -> None:
        self.is_complete = False
        self.keeps_alive = True
        self._answer = answer
        self._is_stream = False
        self._rest = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Notice a stream of events, and the end of the connection."""
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")
        elif name.lower() == b"connection":
            self.keeps_alive = value.lower() != b"close"

    def on_body(self, body: bytes) -> None:
        """Take the complete lines of a stream; comments and blank lines are skipped."""
        self._rest += body
        if not self._is_stream:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            data = line[5:].strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                event = msgspec.json.decode(data)
                self._answer.take(event, time.perf_counter())
                if error := event.get("error"):
                    self._answer.error = str(error.get("message"))

    def on_message_complete(self) -> None:
        """Mark the end; an answer that is no stream is an error."""
        self.is_complete = True
        if not self._is_stream:
            self._answer.error = self._rest[:500].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Load:
    """Clients at once, or requests per second; one of them."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """Its cell in the table."""
        if self.concurrency is None:
            return f"{self.rate:g} req/s"
        return f"{self.concurrency} client{'' if self.concurrency == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All answers of one load, and how long it took."""

    load: Load
    answers: tuple[Answer, ...]
    duration_s: float

    @property
    def good(self) -> list[Answer]:
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


def put_load(endpoint: Endpoint, load: Load, bodies: Sequence[Body], *, seed: int = 0) -> LoadResult:
    """Send all bodies. Raises: ServerUnreachableError if there is no server."""
    started = time.perf_counter()
    answers = asyncio.run(_ask_all(endpoint, load, bodies, seed))
    return LoadResult(load, tuple(answers), time.perf_counter() - started)


async def _ask_all(endpoint: Endpoint, load: Load, bodies: Sequence[Body], seed: int) -> list[Answer]:
    gaps = random.Random(seed)
    slots = asyncio.Semaphore(load.concurrency or len(bodies))
    idle: list[StreamClient] = []

    async def ask(body: Body) -> Answer:
        async with slots:
            client = idle.pop() if idle else StreamClient(endpoint)
            answer = await client.ask(body)
            idle.append(client)
            return answer

    tasks: list[asyncio.Task[Answer]] = []
    try:
        for body in bodies:
            if load.rate is not None and tasks:
                await asyncio.sleep(gaps.expovariate(load.rate))
            tasks.append(asyncio.create_task(ask(body)))
        return list(await asyncio.gather(*tasks))
    finally:
        for client in idle:
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
