"""L2: ten times as many requests as the server can do, and its throughput meanwhile.

Throughput is compared between neighbouring windows of time, calm and flooded in turn, because the machine's speed
drifts. A calm window has twice as many clients as running slots, so that no slot is free and no request is refused.
Only tokens that arrive within a window count. The clients share the server's cores. Next to read: `loads.py`.
"""

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.soak.client import Seen, ask, chat_body
from benchmarks.soak.loads import HELLO, background
from benchmarks.soak.row import Row, at_percent
from benchmarks.soak.server import Server, probes

SETTLE_S = 1.0
"""Beginning of a window that does not count."""
MOST_CALM_S = 5.0


@dataclass(frozen=True)
class Window:
    """Complete answers of a time span."""

    tokens_per_s: float
    answers_per_s: float
    seen: Sequence[Seen]


async def overload(
    server: Server, *, burst: int = 200, num_slots: int, num_places: int, duration_s: float, factor: float = 10.0
) -> Row:
    """L2: `burst` requests at once, then `factor` times the capacity. `num_places`: running slots and queue."""
    num_parts = max(4, min(10, round(duration_s / 10)))
    part_s = duration_s / num_parts
    calm_s = min(MOST_CALM_S, part_s)
    row = Row("L2", f"overload: {burst} at once, then {factor:g}× capacity for {num_parts} × {part_s:g} s")
    await ask(server.url, HELLO)
    looks: list[Seen] = []
    async with background(probes(server, "/health/ready", 0.05, looks)):
        first, again = await _burst(server, burst)
        calm = [await _calm(server, 2 * num_slots, calm_s)]
        floods: list[Window] = []
        for _ in range(num_parts):
            floods.append(await _flood(server, factor * calm[-1].answers_per_s, part_s))
            calm.append(await _calm(server, 2 * num_slots, calm_s))
    flooded = [item for window in floods for item in window.seen]
    others = [item for item in (*first, *again, *flooded) if item.status != 429 and not item.is_good]
    admitted = sum(item.status == 200 for item in first)
    row.check(f"admitted of {burst} (≤ {num_places})", admitted, passes=0 < admitted <= num_places)
    row.check("neither answered nor 429", len(others), passes=not others)
    _judge_refusals(row, "of the burst", first)
    _judge_refusals(row, "of the flood", flooded)
    ready_s = at_percent([item.took_s for item in looks], 99)
    failed = sum(item.status != 200 for item in looks)
    row.check("ready p99 ms (≤ 200)", 1e3 * ready_s, passes=ready_s <= 0.2 and not failed)
    share = sum(item.status == 200 for item in again) / max(1, len(again))
    row.check("first retry after the hint admitted (≥ 0.8)", share, passes=share >= 0.8)
    row.note("requests/s sent", len(flooded) / (num_parts * part_s))
    peaks = [(before.tokens_per_s + after.tokens_per_s) / 2 for before, after in itertools.pairwise(calm)]
    goodput = sum(window.tokens_per_s for window in floods)
    row.note("peak tok/s", sum(peaks) / len(peaks))
    row.check("goodput ÷ peak (≥ 0.9)", goodput / sum(peaks), passes=goodput >= 0.9 * sum(peaks))
    return row


def _judge_refusals(row: Row, name: str, seen: Iterable[Seen]) -> None:
    refused = [item for item in seen if item.status == 429]
    without = [item for item in refused if item.retry_after_s is None or item.retry_after_s < 1]
    row.check(f"429 {name} without Retry-After", len(without), passes=not without)
    p99_s = at_percent([item.took_s for item in refused], 99)
    row.check(f"429 {name} p99 ms (≤ 250)", 1e3 * p99_s, passes=p99_s <= 0.25)


def _body(index: int) -> dict[str, Any]:
    """Return a request for 48 to 80 tokens: answers of one length would begin and end together, in fewer steps."""
    return chat_body(f"Count. {index}", 48 + 29 * index % 33)


async def _burst(server: Server, count: int) -> tuple[list[Seen], list[Seen]]:
    """Send `count` requests at once; refused ones come back once, after the time of the hint."""

    async def twice(body: dict[str, Any]) -> tuple[Seen, Seen | None]:
        seen = await ask(server.url, body)
        if seen.status != 429 or seen.retry_after_s is None:
            return seen, None
        await asyncio.sleep(seen.retry_after_s)
        return seen, await ask(server.url, body)

    pairs = await asyncio.gather(*[twice(_body(index)) for index in range(count)])
    await server.seconds_until_idle()
    return [first for first, _ in pairs], [second for _, second in pairs if second is not None]


async def _calm(server: Server, num_clients: int, duration_s: float) -> Window:
    """Run closed loops."""
    seen: list[Seen] = []
    numbers = itertools.count()
    start_s = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() < start_s + duration_s:
            seen.append(await ask(server.url, _body(next(numbers))))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    await server.seconds_until_idle()
    return _window(seen, start_s, duration_s)


async def _flood(server: Server, rate: float, duration_s: float) -> Window:
    """Run an open loop of `rate` requests per second."""
    start_s = time.perf_counter()
    shots: list[asyncio.Task[Seen]] = []
    while (passed_s := time.perf_counter() - start_s) < duration_s:
        while len(shots) < passed_s * rate:
            shots.append(asyncio.create_task(ask(server.url, _body(len(shots)))))
        await asyncio.sleep(0.005)
    seen = await asyncio.gather(*shots)
    await server.seconds_until_idle()
    return _window(seen, start_s, duration_s)


def _window(seen: Sequence[Seen], start_s: float, duration_s: float) -> Window:
    begin_s, end_s = start_s + SETTLE_S, start_s + duration_s
    shares = [
        (item.num_tokens, sum(begin_s <= time_s < end_s for time_s in item.piece_times) / len(item.piece_times))
        for item in seen
        if item.is_good and item.piece_times
    ]
    tokens_per_s = sum(num_tokens * share for num_tokens, share in shares) / (end_s - begin_s)
    return Window(tokens_per_s, sum(share for _, share in shares) / (end_s - begin_s), seen)
