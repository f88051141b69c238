"""L2: far more requests than the server can do, and what is left of its speed meanwhile.

Speed is compared between neighbouring windows of time, calm and flooded in turn, because machines change theirs; what
counts is the tokens that came within a window, without its beginning and without the requests that are worked off
after it. In a calm window as many clients wait as run: no seat is ever free, and nobody is refused. The clients share
the server's cores, which attackers do not. They are of the cheapest kind and wake up as often when it is calm; what
they take beyond that counts as if it were the server's. Next to read: `flood.py`.
"""

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.soak.client import Seen, ask, chat_body
from benchmarks.soak.flood import Flood, refusing_server
from benchmarks.soak.loads import HELLO, background
from benchmarks.soak.row import Row, at_percent
from benchmarks.soak.server import Server, probes

SETTLE_S = 1.0
"""How long a window has begun before it counts."""
MOST_CALM_S = 5.0


@dataclass(frozen=True)
class Window:
    """What came in a time. `tokens_per_s`: of whole answers. `cpu_s`: of server, engine and clients."""

    tokens_per_s: float
    answers_per_s: float
    seen: Sequence[Seen]
    cpu_s: Sequence[float]


async def overload(
    server: Server, *, burst: int = 200, num_seats: int, num_places: int, duration_s: float, factor: float = 10.0
) -> Row:
    """L2: `burst` requests at once, then `factor` times what the server can do. `num_places`: seats and queue."""
    num_parts = max(4, min(10, round(duration_s / 10)))
    part_s = duration_s / num_parts
    calm_s = min(MOST_CALM_S, part_s)
    row = Row("L2", f"overload: {burst} at once, then {factor:g}× capacity for {num_parts} × {part_s:g} s on kept "
              "connections, by clients on the same cores")  # fmt: skip
    await ask(server.url, HELLO)
    looks: list[Seen] = []
    async with background(probes(server, "/health/ready", 0.05, looks)):
        first, again = await _burst(server, burst)
        calm = [await _calm(server, 2 * num_seats, calm_s)]
        floods: list[Window] = []
        for _ in range(num_parts):
            floods.append(await _flood(server, factor * calm[-1].answers_per_s, part_s))
            calm.append(await _calm(server, 2 * num_seats, calm_s))
        cheap = await _beside_cheapest(server, factor * calm[-1].answers_per_s, 2 * num_seats, calm_s)
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
    row.note("hints s up to", max((item.retry_after_s or 0.0 for item in first), default=0.0))
    row.note("requests/s sent", len(flooded) / (num_parts * part_s))
    _judge_goodput(row, calm, floods)
    row.note("CPUs of server, engine, clients, calm", _cpu_shares(calm, calm_s))
    row.note("in the flood", _cpu_shares(floods, part_s))
    row.note("goodput ÷ peak beside a flood that the cheapest server refuses", cheap / calm[-1].tokens_per_s)
    return row


def _judge_refusals(row: Row, name: str, seen: Iterable[Seen]) -> None:
    refused = [item for item in seen if item.status == 429]
    without = [item for item in refused if item.retry_after_s is None or item.retry_after_s < 1]
    row.check(f"429 {name} without Retry-After", len(without), passes=not without)
    p99_s = at_percent([item.took_s for item in refused], 99)
    row.check(f"429 {name} p99 ms (≤ 250)", 1e3 * p99_s, passes=p99_s <= 0.25)


def _judge_goodput(row: Row, calm: Sequence[Window], floods: Sequence[Window]) -> None:
    """The peak is the mean of the calm windows before and after each flood."""
    peaks = [(before.tokens_per_s + after.tokens_per_s) / 2 for before, after in itertools.pairwise(calm)]
    goodput = sum(window.tokens_per_s for window in floods)
    row.note("peak tok/s", sum(peaks) / len(peaks))
    row.check("goodput ÷ peak (≥ 0.9)", goodput / sum(peaks), passes=goodput >= 0.9 * sum(peaks))
    shares = [window.tokens_per_s / peak for window, peak in zip(floods, peaks, strict=True)]
    row.note("of the parts", f"{min(shares):.2f} to {max(shares):.2f}")


def _cpu_shares(windows: Sequence[Window], duration_s: float) -> str:
    sums = [sum(window.cpu_s[index] for window in windows) for index in range(len(windows[0].cpu_s))]
    return " ".join(f"{seconds / len(windows) / duration_s:.2f}" for seconds in sums)


def _body(index: int) -> dict[str, Any]:
    """48 to 80 tokens: answers of one length would begin and end together when it is calm, which takes fewer steps."""
    return chat_body(f"Count. {index}", 48 + 29 * index % 33)


async def _burst(server: Server, count: int) -> tuple[list[Seen], list[Seen]]:
    """So many at once; and what those saw who were refused and came back once, after the time that they were told."""
    lines = Flood(server.url, keeps=False)

    async def twice(first: asyncio.Future[Seen], body: dict[str, Any]) -> tuple[Seen, Seen | None]:
        seen = await first
        if seen.status != 429 or seen.retry_after_s is None:
            return seen, None
        await asyncio.sleep(seen.retry_after_s)
        return seen, await lines.send(body)

    bodies = [_body(index) for index in range(count)]
    pairs = await asyncio.gather(*[twice(lines.send(body), body) for body in bodies])
    lines.close()
    await server.seconds_until_idle()
    return [first for first, _ in pairs], [second for _, second in pairs if second is not None]


async def _calm(server: Server, num_clients: int, duration_s: float) -> Window:
    """Closed loops."""
    lines = Flood(server.url, keeps=True)
    seen: list[Seen] = []
    numbers = itertools.count()

    async def client() -> None:
        while time.perf_counter() < start_s + duration_s:
            seen.append(await lines.send(_body(next(numbers))))

    start_s, before_s = time.perf_counter(), _cpu_seconds(server)
    clients = asyncio.gather(*(client() for _ in range(num_clients)))
    await asyncio.sleep(duration_s)
    cpu_s = _since(before_s, server)
    await clients
    lines.close()
    await server.seconds_until_idle()
    return _window(seen, start_s, duration_s, cpu_s)


async def _flood(server: Server, rate: float, duration_s: float) -> Window:
    """An open loop."""
    start_s, before_s = time.perf_counter(), _cpu_seconds(server)
    lines = Flood(server.url, keeps=True)
    flood = asyncio.create_task(lines.run(rate, duration_s, _body))
    await asyncio.sleep(duration_s)
    cpu_s = _since(before_s, server)
    seen = await flood
    lines.close()
    await server.seconds_until_idle()
    return _window(seen, start_s, duration_s, cpu_s)


async def _beside_cheapest(server: Server, rate: float, num_clients: int, duration_s: float) -> float:
    """Tokens per second of closed loops while as large a flood, on the same cores, is none of the server's business."""
    with refusing_server() as url:
        lines = Flood(url, keeps=True)
        flood = asyncio.create_task(lines.run(rate, duration_s, _body))
        window = await _calm(server, num_clients, duration_s)
        await flood
        lines.close()
    return window.tokens_per_s


def _window(seen: Sequence[Seen], start_s: float, duration_s: float, cpu_s: Sequence[float]) -> Window:
    begin_s, end_s = start_s + SETTLE_S, start_s + duration_s
    shares = [
        (item.num_tokens, sum(begin_s <= time_s < end_s for time_s in item.piece_times) / len(item.piece_times))
        for item in seen
        if item.is_good and item.piece_times
    ]
    tokens_per_s = sum(num_tokens * share for num_tokens, share in shares) / (end_s - begin_s)
    return Window(tokens_per_s, sum(share for _, share in shares) / (end_s - begin_s), seen, cpu_s)


def _cpu_seconds(server: Server) -> list[float]:
    """Of the server, its engine and this process."""
    front_end, engine, *_ = server.processes()
    times = [process.cpu_times() for process in (front_end, engine, psutil.Process())]
    return [item.user + item.system for item in times]


def _since(before_s: Sequence[float], server: Server) -> list[float]:
    return [after - before for before, after in zip(before_s, _cpu_seconds(server), strict=True)]
