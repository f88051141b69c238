"""The rows that take long: L1, a soak with clients of all kinds, and L2, far more than the server can do.

Next to read: `loads.py`.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from benchmarks.soak.client import POLITE, Manners, Seen, ask, chat_body
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
    """L2: `burst` requests at once, then `factor` times what the server can do. `num_places`: running and queue."""
    row = Row("L2", f"overload: {burst} at once, then {factor:g}× capacity for {duration_s:g} s")
    await ask(server.url, HELLO)
    looks: list[Seen] = []
    async with background(probes(server, "/health/ready", 0.05, looks)):
        pairs = await asyncio.gather(*(_ask_twice(server, chat_body(f"Count. {index}", 64)) for index in range(burst)))
        seen = [first for first, _ in pairs]
        again = [second for _, second in pairs if second is not None]
        refused = [item for item in seen if item.status == 429]
        admitted = [item for item in seen if item.status == 200]
        await server.seconds_until_idle()
        peak = await _goodput(server, num_clients=8, duration_s=min(15.0, duration_s))
        flooded, seconds = await _flood(server, rate=factor * peak[1], duration_s=duration_s)
        await server.seconds_until_idle()
    others = [item for item in (*seen, *again, *flooded) if item.status != 429 and not item.is_good]
    refused += [item for item in flooded if item.status == 429]
    row.check(f"admitted of {burst} (≤ {num_places})", len(admitted), passes=0 < len(admitted) <= num_places)
    row.check("neither answered nor 429", len(others), passes=not others)
    without = [item for item in refused if item.retry_after_s is None or item.retry_after_s < 1]
    row.check("429 without Retry-After", len(without), passes=not without)
    p99_s = at_percent([item.took_s for item in refused], 99)
    row.check("429 p99 ms (≤ 250)", 1e3 * p99_s, passes=p99_s <= 0.25)
    ready_s = at_percent([item.took_s for item in looks], 99)
    failed = sum(item.status != 200 for item in looks)
    row.check("ready p99 ms (≤ 200)", 1e3 * ready_s, passes=ready_s <= 0.2 and not failed)
    share = sum(item.status == 200 for item in again) / max(1, len(again))
    row.check("first retry after the hint admitted (≥ 0.8)", share, passes=share >= 0.8)
    goodput = sum(item.num_tokens for item in flooded if item.is_good) / seconds
    row.note("peak tok/s", peak[0])
    row.note("requests/s sent", len(flooded) / seconds)
    row.check("goodput ÷ peak (≥ 0.9)", goodput / peak[0], passes=goodput >= 0.9 * peak[0])
    return row


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


async def _flood(server: Server, *, rate: float, duration_s: float) -> tuple[list[Seen], float]:
    """An open loop, and how long it took until all were answered."""
    start_s = time.perf_counter()
    tasks: list[asyncio.Task[Seen]] = []
    while time.perf_counter() < start_s + duration_s:
        tasks.append(asyncio.create_task(ask(server.url, chat_body(f"Flood. {len(tasks)}", 64))))
        await asyncio.sleep(max(0.0, start_s + len(tasks) / rate - time.perf_counter()))
    seen = list(await asyncio.gather(*tasks))
    return seen, time.perf_counter() - start_s


async def _ask_twice(server: Server, body: dict[str, Any]) -> tuple[Seen, Seen | None]:
    """Whoever is refused comes back once, after the time that it was told."""
    first = await ask(server.url, body)
    if first.status != 429 or first.retry_after_s is None:
        return first, None
    await asyncio.sleep(first.retry_after_s)
    return first, await ask(server.url, body)
