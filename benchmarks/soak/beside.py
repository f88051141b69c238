"""Attacks of one client (A) beside another client's streams, on a server with a key for each.

`beside` measures a client that does nothing wrong, first alone, then during the attack: all of its requests are
answered, the first token of a new request and the distance of tokens at most double. Next to read: `client.py`.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.soak.client import Seen, ask, chat_body, get
from benchmarks.soak.row import Row, at_percent
from benchmarks.soak.server import Server, serving

NORMAL, ATTACKER = "normal-" + "n" * 32, "attacker-" + "a" * 32
"""The API keys of the two clients."""
NUM_STREAMS = 8
MAX_RATIO = 2.0
FLOOR_S = 0.02
"""Shorter times are as good as this one: a ratio of them would be noise."""
Attack = Callable[[Server], Awaitable[object]]


@dataclass
class View:
    """Measurements of the client that does nothing wrong."""

    streams: list[Seen] = field(default_factory=list)
    """Long answers, `NUM_STREAMS` at a time."""
    firsts: list[Seen] = field(default_factory=list)
    """Short requests, one after the other: time to the first token."""
    looks: list[Seen] = field(default_factory=list)
    """Answers of /health/live."""

    def failures(self) -> list[str]:
        """Return what a request or probe that failed says."""
        failed = [item for item in (*self.streams, *self.firsts) if not item.is_good]
        failed += [item for item in self.looks if item.status != 200]
        return [f"{item.status} {item.error or ''}".strip() for item in failed]

    def first_token_s(self, percent: float = 95) -> float:
        """Return the time to the first token of the short requests."""
        return at_percent([item.piece_times[0] - item.started_s for item in self.firsts if item.piece_times], percent)

    def gap_s(self, percent: float = 95) -> float:
        """Return the distance of the streams' tokens."""
        return at_percent([gap for item in self.streams for gap in item.gaps_s], percent)


@contextlib.contextmanager
def serving_two(model: str, *arguments: str) -> Iterator[Server]:
    """Serve a model to the two keys."""
    environment = {"QUIRE_API_KEY": f"{NORMAL},{ATTACKER}"}
    with serving(model, "--max-num-seqs", "16", *arguments, environment=environment, key=NORMAL) as server:
        yield server


async def beside(row: Row, server: Server, attack: Attack, *, name: str, duration_s: float = 8.0) -> View:
    """Run `attack` until `duration_s` is over, beside a normal client. Returns: what that client saw meanwhile.

    `attack` is called again when it returns, and cancelled at the end. Mutates: the row gets its three limits.
    """
    calm = await _look(server, duration_s / 2)
    task = asyncio.create_task(_again(server, attack))
    try:
        seen = await _look(server, duration_s)
    finally:
        if task.done():
            task.result()  # an attack that fails attacks nothing
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    failures = seen.failures()
    row.check(f"{name}: normal requests failed of {len(seen.streams) + len(seen.firsts)}", len(failures),
              passes=not failures and not calm.failures())  # fmt: skip
    if failures:
        row.note("of them", failures[:3])
    for what, alone_s, with_s in (
        ("first token", calm.first_token_s(), seen.first_token_s()),
        ("gap", calm.gap_s(), seen.gap_s()),
    ):
        ratio = max(with_s, FLOOR_S) / max(alone_s, FLOOR_S)
        row.check(f"{what} {1e3 * with_s:.0f} ms, × alone (≤ {MAX_RATIO:g})", ratio, passes=ratio <= MAX_RATIO)
    return seen


async def _again(server: Server, attack: Attack) -> None:
    while True:
        await attack(server)
        await asyncio.sleep(0)


async def _look(server: Server, duration_s: float) -> View:
    view, end_s = View(), time.perf_counter() + duration_s

    async def stream(index: int) -> None:
        while time.perf_counter() < end_s:
            body = chat_body(f"Tell me a story. {index}", 100)
            view.streams.append(await ask(server.url, body, key=NORMAL))

    async def short() -> None:
        while time.perf_counter() < end_s:
            view.firsts.append(await ask(server.url, chat_body(f"Hi {len(view.firsts)}", 2), key=NORMAL))
            await asyncio.sleep(0.05)

    async def probe() -> None:
        while time.perf_counter() < end_s:
            view.looks.append(await get(server.url, "/health/live"))
            await asyncio.sleep(0.05)

    await asyncio.gather(*(stream(index) for index in range(NUM_STREAMS)), short(), probe())
    return view
