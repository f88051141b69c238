"""Connections that hold places and memory (A5) beside another client: half requests, large bodies.

An attacker that is dropped comes back after a moment. Next to read: `beside.py`, `src/quire/server/bodies.py`.
"""

import asyncio
import contextlib
import resource
from collections import Counter
from urllib.parse import urlsplit

from benchmarks.soak.beside import ATTACKER, beside, serving_two
from benchmarks.soak.client import CHAT
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server

NUM_HALVES, NUM_BODIES = 4400, 300
BODY_BYTES = 4 << 20
PIECE_BYTES = 64 << 10
PAUSE_S, START_S = 2.0, 3.0
"""Time until a dropped attacker comes back, and until all of them are there: they share the process of the client that
is measured, whose own heads must not come late for it."""
MAX_MIB = {"half": 200, "keyed": 192, "keyless": 64}
"""Growth of the server's process: 48 KiB of each connection; 128 MiB of all bodies, and their connections; neither."""
MAX_LEFT_MIB = 48
SETTLE_S = 4.0
POLL_S = 0.05


async def half_requests(model: str, *, duration_s: float) -> Row:
    """A5a: more half requests than there are places."""
    return await _held(model, "A5a", f"{NUM_HALVES} half requests", "half", NUM_HALVES, b"X-A: ", 0, duration_s)


async def large_bodies(model: str, *, duration_s: float) -> Row:
    """A5b: bodies that never end, of one key."""
    end = b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n" % (ATTACKER.encode(), BODY_BYTES)
    what = f"{NUM_BODIES} bodies of 4 MiB - 2 at once"
    return await _held(model, "A5b", what, "keyed", NUM_BODIES, end, BODY_BYTES - 2, duration_s)


async def keyless_bodies(model: str, *, duration_s: float) -> Row:
    """A5c: the same without a key."""
    end = b"Content-Length: %d\r\n\r\n" % BODY_BYTES
    what = f"{NUM_BODIES} bodies of 4 MiB - 2 at once, without a key"
    return await _held(model, "A5c", what, "keyless", NUM_BODIES, end, BODY_BYTES - 2, duration_s)


async def _held(
    model: str, row_id: str, what: str, kind: str, count: int, end: bytes, num_body: int, duration_s: float
) -> Row:
    """Measure a client and the server's memory beside `count` connections with a head that ends so, and a body."""
    row, answers = Row(row_id, what), Counter[str]()
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with serving_two(model) as server:
        front_end, most_bytes = server.processes()[0], 0

        async def attack(server: Server) -> None:
            await asyncio.gather(
                *(_attacker(server, end, num_body, answers, START_S * number / count) for number in range(count))
            )

        async def watch() -> None:
            nonlocal most_bytes
            while True:
                most_bytes = max(most_bytes, front_end.memory_info().rss)
                await asyncio.sleep(POLL_S)

        before_bytes = front_end.memory_info().rss
        watching = asyncio.create_task(watch())
        try:
            await beside(row, server, attack, name="beside it", duration_s=duration_s)
        finally:
            watching.cancel()
        await asyncio.sleep(SETTLE_S)
        left_bytes = front_end.memory_info().rss
    for name, num_bytes, most_mib in (
        ("growth of the server", most_bytes, MAX_MIB[kind]), ("left of it", left_bytes, MAX_LEFT_MIB),
    ):  # fmt: skip
        growth_mib = (num_bytes - before_bytes) / 2**20
        row.check(f"{name} in MiB (≤ {most_mib})", growth_mib, passes=growth_mib <= most_mib)
    row.note("attackers' answers", dict(sorted(answers.items())))
    return row


async def _attacker(server: Server, end: bytes, num_body: int, answers: Counter[str], start_s: float) -> None:
    """Send a request but for its last bytes and wait until the server ends the connection, again and again."""
    await asyncio.sleep(start_s)
    parts = urlsplit(server.url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n".encode() + end
    while True:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(str(parts.hostname), parts.port)
            writer.write(head)
            answer = asyncio.create_task(reader.read(16))
            with contextlib.suppress(ConnectionError):
                for at in range(0, num_body, PIECE_BYTES):
                    if answer.done():
                        break  # more would measure the network
                    writer.write(b" " * min(PIECE_BYTES, num_body - at))
                    await writer.drain()
            answers[(await answer)[9:12].decode() or "none"] += 1
        except OSError:
            answers["none"] += 1
        finally:
            if writer is not None:
                writer.transport.abort()
        await asyncio.sleep(PAUSE_S)
