"""L1, a soak with clients of all kinds. Next to read: `loads.py`."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass

from benchmarks.soak.client import POLITE, Manners, Seen, ask, chat_body
from benchmarks.soak.loads import gathered, prompt_of
from benchmarks.soak.row import Row, slope
from benchmarks.soak.server import Server

DEADLINE_S = 120.0
NUM_PARTS = 10
SETTLE_S = 40.0
"""Idle connections are closed after 30 s."""
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
