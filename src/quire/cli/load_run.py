"""Puts load on a server: so many clients at once, or so many requests a second; returns what each client saw.

Closed loop: each client sends its next request when its last is answered. Open loop: requests come when they come,
with exponential gaps from a seed, whatever the server does. Next to read: `load_client.py`.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.cli.load_client import Answer, Endpoint, StreamClient

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """Clients at once, or requests per second; one of them."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """As it stands in the table."""
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
        """Generated tokens of complete answers."""
        return sum(answer.num_tokens for answer in self.good) / self.duration_s

    def values_ms(self, metric: str) -> list[float]:
        """All values of "ttft", "itl" (gaps between pieces of text) or "e2e", in milliseconds."""
        if metric == "itl":
            return [1e3 * gap for answer in self.good for gap in _gaps(answer.chunk_times)]
        if metric == "ttft":
            return [1e3 * answer.time_to_first_s for answer in self.good]
        return [1e3 * (answer.ended_s - answer.started_s) for answer in self.good]

    def percentile_ms(self, metric: str, percent: int) -> float:
        """The value that so many percent do not exceed; NaN without complete answers."""
        return percentile(self.values_ms(metric), percent)


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def put_load(endpoint: Endpoint, load: Load, bodies: Sequence[Body], *, seed: int = 0) -> LoadResult:
    """Send all bodies. Raises: ServerUnreachableError if there is no server."""
    run = _closed_loop if load.concurrency is not None else _open_loop
    started = time.perf_counter()
    answers = asyncio.run(run(endpoint, load, bodies, seed))
    return LoadResult(load, tuple(answers), time.perf_counter() - started)


async def _closed_loop(endpoint: Endpoint, load: Load, bodies: Sequence[Body], seed: int) -> list[Answer]:
    waiting = iter(bodies)

    async def client() -> list[Answer]:
        with_connection = StreamClient(endpoint)
        try:
            return [await with_connection.ask(body) for body in waiting]
        finally:
            with_connection.close()

    assert load.concurrency is not None
    return _joined(await asyncio.gather(*[client() for _ in range(load.concurrency)]))


async def _open_loop(endpoint: Endpoint, load: Load, bodies: Sequence[Body], seed: int) -> list[Answer]:
    assert load.rate is not None
    gaps = random.Random(seed)
    idle: list[StreamClient] = []

    async def one(body: Body) -> Answer:
        client = idle.pop() if idle else StreamClient(endpoint)
        answer = await client.ask(body)
        idle.append(client)
        return answer

    tasks: list[asyncio.Task[Answer]] = []
    for body in bodies:
        tasks.append(asyncio.create_task(one(body)))
        await asyncio.sleep(gaps.expovariate(load.rate))
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for client in idle:
            client.close()


def highest_rate(holds: Callable[[float], bool], first: float, *, num_halvings: int = 3) -> float:
    """The highest rate that `holds`, found by doubling and then halving the gap; 0 if not even `first / 16` does."""
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


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _joined(lists: Iterable[list[Answer]]) -> list[Answer]:
    return [answer for answers in lists for answer in answers]


def median_tokens(result: LoadResult) -> float:
    """Prompt tokens of a typical request."""
    return statistics.median([answer.num_prompt_tokens for answer in result.good] or [0])
