"""Load on a server and the answers of its clients: closed loop (clients at once) or open (requests per second).

A client must not take the processor from the server that it measures, so it uses connections of its own, which cost
a fraction of httpx2's. In a closed loop each client sends its next request when its last is answered; in an open loop
requests come with exponential gaps from a seed. Next to read: `cli/bench_serve.py`, `upstream.py`.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec

from quire.cli.server_client import StreamedAnswer, base_url, errors_named
from quire_workshop.upstream import Upstream

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
