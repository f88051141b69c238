"""The rows that take long: L1, a soak with clients of all kinds, and L2, far more than the server can do.

Next to read: `loads.py`.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.soak.client import POLITE, Manners, Seen, ask, chat_body
from benchmarks.soak.flood import Flood, refusing_server
from benchmarks.soak.loads import HELLO, background, gathered, prompt_of
from benchmarks.soak.row import Row, at_percent, slope
from benchmarks.soak.server import Server, probes

DEADLINE_S = 120.0
NUM_PARTS = 10
SETTLE_S = 40.0
"""Connections that nobody uses are closed after 30 s."""
JUDGED_S = 300.0
"""A shorter run says nothing about slopes."""


@dataclass(frozen=True)
class Sample:
    """A look at the server from outside."""

    time_s: float
    num_requests: int
    resident_bytes: int
    generated_tokens: float


async def soak(server: Server, *, duration_s: float = 600.0, num_clients: int = 8, seed: int = 0) -> Row:
    """L1: closed loops of mixed requests, a fifth of which are left by their clients."""
    row = Row("L1", f"soak: {num_clients} clients, {duration_s:g} s, 20 % leave")
    await gathered(server, num_clients, 32)
    await server.seconds_until_idle()
    num_files, num_threads = server.num_files(), server.num_threads()
    end_s = time.perf_counter() + duration_s
    seen: list[Seen] = []
    samples: list[Sample] = []
    watcher = asyncio.create_task(_watch(server, seen, samples, max(0.5, duration_s / 60)))
    await asyncio.gather(*(_client(server, seen, random.Random(seed + index), end_s) for index in range(num_clients)))
    watcher.cancel()
    idle_s = await server.seconds_until_idle(10)
    statuses = Counter(item.status for item in seen if not item.hung_up)
    bad = [item for item in seen if not item.hung_up and not item.is_good]
    late = [item for item in seen if item.took_s > DEADLINE_S]
    row.note("requests", len(seen))
    row.note("left", sum(item.hung_up for item in seen))
    row.check("not answered well", f"{len(bad)} {dict(statuses) if bad else ''}".strip(), passes=not bad)
    row.check(f"beyond {DEADLINE_S:g} s", len(late), passes=not late)
    row.check("idle after s (all blocks free)", idle_s, passes=idle_s <= 1)
    await asyncio.sleep(0.5)
    files, threads = server.num_files() - num_files, server.num_threads() - num_threads
    row.check("descriptors more (≤ 2)", files, passes=files <= 2)
    row.check("threads more (≤ 2)", threads, passes=threads <= 2)
    _judge_slopes(row, samples, is_judged=duration_s >= JUDGED_S)
    return row


def _judge_slopes(row: Row, samples: list[Sample], *, is_judged: bool) -> None:
    late = samples[len(samples) // 2 :]
    if len(late) < 2:
        return
    mib = 1000 * slope([item.num_requests for item in late], [item.resident_bytes / 2**20 for item in late])
    speeds = []
    for part in (samples[: len(samples) // NUM_PARTS + 2], samples[-(len(samples) // NUM_PARTS) - 2 :]):
        speeds.append((part[-1].generated_tokens - part[0].generated_tokens) / (part[-1].time_s - part[0].time_s))
    share = speeds[1] / max(speeds[0], 1e-9)
    note = "" if is_judged else f"; not judged below {JUDGED_S:g} s"
    row.check(f"RSS MiB per 1,000 requests, second half (≤ 1{note})", mib, passes=mib <= 1 or not is_judged)
    row.check(f"last tenth ÷ first tok/s (≥ 0.95{note})", share, passes=share >= 0.95 or not is_judged)


async def _watch(server: Server, seen: list[Seen], samples: list[Sample], every_s: float) -> None:
    while True:
        tokens = (await server.metrics()).value("quire_generation_tokens_total")
        samples.append(Sample(time.perf_counter(), len(seen), server.resident_bytes(), tokens))
        await asyncio.sleep(every_s)


async def _client(server: Server, seen: list[Seen], choices: random.Random, end_s: float) -> None:
    while time.perf_counter() < end_s:
        text = prompt_of(choices.randint(46, 512), choices.getrandbits(32))
        body = chat_body(text, choices.randint(8, 128), stream=choices.random() < 0.5)
        manners = POLITE
        if choices.random() < 0.2:
            manners = Manners(hang_up_after_s=choices.uniform(0.0, 2.0), resets=choices.random() < 0.5)
        seen.append(await ask(server.url, body, manners))


async def overload(
    server: Server, *, burst: int = 200, num_places: int = 40, duration_s: float = 30.0, factor: float = 10.0
) -> Row:
    """L2: `burst` requests at once, then `factor` times what the server can do. `num_places`: running and queue.

    What the server can do is measured before and after, because machines change their speed.
    """
    row = Row("L2", f"overload: {burst} at once, then {factor:g}× capacity for {duration_s:g} s on kept connections")
    await ask(server.url, HELLO)
    looks: list[Seen] = []
    calm_s = min(10.0, duration_s)
    async with background(probes(server, "/health/ready", 0.05, looks)):
        pairs = await asyncio.gather(*(_ask_twice(server, chat_body(f"Count. {index}", 64)) for index in range(burst)))
        seen = [first for first, _ in pairs]
        again = [second for _, second in pairs if second is not None]
        await server.seconds_until_idle()
        before = await _goodput(server, num_clients=8, duration_s=calm_s)
        cpu_s = _cpu_seconds(server)
        flooded, seconds = await Flood(server.url, keeps=True).run(factor * before[1], duration_s)
        shares = [(after_s - at_s) / seconds for at_s, after_s in zip(cpu_s, _cpu_seconds(server), strict=True)]
        await server.seconds_until_idle()
        after = await _goodput(server, num_clients=8, duration_s=calm_s)
    others = [item for item in (*seen, *again, *flooded) if item.status != 429 and not item.is_good]
    admitted = sum(item.status == 200 for item in seen)
    row.check(f"admitted of {burst} (≤ {num_places})", admitted, passes=0 < admitted <= num_places)
    row.check("neither answered nor 429", len(others), passes=not others)
    _judge_refusals(row, [item for item in (*seen, *flooded) if item.status == 429])
    ready_s = at_percent([item.took_s for item in looks], 99)
    failed = sum(item.status != 200 for item in looks)
    row.check("ready p99 ms (≤ 200)", 1e3 * ready_s, passes=ready_s <= 0.2 and not failed)
    share = sum(item.status == 200 for item in again) / max(1, len(again))
    row.check("first retry after the hint admitted (≥ 0.8)", share, passes=share >= 0.8)
    row.note("hints s up to", max((item.retry_after_s or 0.0 for item in seen), default=0.0))
    peak = (before[0] + after[0]) / 2
    row.note("peak tok/s before and after", f"{before[0]:.0f} {after[0]:.0f}")
    row.note("requests/s sent", len(flooded) / seconds)
    goodput = sum(item.num_tokens for item in flooded if item.is_good) / seconds
    row.check("goodput ÷ peak (≥ 0.9)", goodput / peak, passes=goodput >= 0.9 * peak)
    row.note("CPUs of server, engine, clients in the flood", " ".join(f"{share:.2f}" for share in shares))
    row.note("goodput ÷ peak beside a flood that the cheapest server refuses",
             await _ceiling(server, factor * before[1], calm_s) / peak)  # fmt: skip
    return row


def _judge_refusals(row: Row, refused: list[Seen]) -> None:
    without = [item for item in refused if item.retry_after_s is None or item.retry_after_s < 1]
    row.check("429 without Retry-After", len(without), passes=not without)
    p99_s = at_percent([item.took_s for item in refused], 99)
    row.check("429 p99 ms (≤ 250)", 1e3 * p99_s, passes=p99_s <= 0.25)


def _cpu_seconds(server: Server) -> list[float]:
    """Of the server, its engine and this process."""
    times = [process.cpu_times() for process in (*server.processes(), psutil.Process())]
    return [item.user + item.system for item in times]


async def _ceiling(server: Server, rate: float, duration_s: float) -> float:
    """Tokens per second of closed loops while as large a flood, on the same cores, is none of the server's business."""
    with refusing_server() as url:
        flood = asyncio.create_task(Flood(url, keeps=True).run(rate, duration_s))
        tokens_per_s, _ = await _goodput(server, num_clients=8, duration_s=duration_s)
        await flood
    return tokens_per_s


async def _goodput(server: Server, *, num_clients: int, duration_s: float) -> tuple[float, float]:
    """Tokens and requests per second of closed loops."""
    seen: list[Seen] = []
    start_s = time.perf_counter()

    async def client(index: int) -> None:
        while time.perf_counter() < start_s + duration_s:
            seen.append(await ask(server.url, chat_body(f"Count. {index} {len(seen)}", 64)))

    await asyncio.gather(*(client(index) for index in range(num_clients)))
    seconds = time.perf_counter() - start_s
    return sum(item.num_tokens for item in seen) / seconds, len(seen) / seconds


async def _ask_twice(server: Server, body: dict[str, Any]) -> tuple[Seen, Seen | None]:
    """Whoever is refused comes back once, after the time that it was told."""
    first = await ask(server.url, body)
    if first.status != 429 or first.retry_after_s is None:
        return first, None
    await asyncio.sleep(first.retry_after_s)
    return first, await ask(server.url, body)
