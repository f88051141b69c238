"""B2: a hundred thousand conversations that no client should have, on a real server.

Requests made from the API's description, numeric fields at their limits, damaged files, templates, schemas and keys
are tests. Next to read: `wire_cases.py`.
"""

import asyncio
import contextlib
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.soak.client import ask
from benchmarks.soak.loads import HELLO
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, status_bytes
from benchmarks.soak.wire_cases import HUGE, MODEL, make_case

PATIENCE_S = 0.25
"""Without a byte for so long, a client takes it that nothing more comes, and leaves."""
HUGE_PATIENCE_S = 3.0
MAX_GROWTH_MIB = 64
NUM_WARM_UP = 1000
SMALL = ("--max-num-seqs", "8", "--max-model-len", "512", "--num-blocks-override", "256", "--served-model-name", MODEL)
"""Options of the server. Each of its few KV blocks is touched before memory is measured."""


async def wire_fuzz(
    server: Server, *, count: int = 100_000, num_clients: int = 150, num_huge: int = 5, seed: int = 20_261
) -> Row:
    """B2, on a server with the options `SMALL`."""
    statuses: Counter[int] = Counter()
    choices = random.Random(seed)
    await _throw_all(server.url, (make_case(choices) for _ in range(NUM_WARM_UP)), num_clients, statuses)
    before = _peak_bytes(server)
    await _throw_all(server.url, (make_case(choices) for _ in range(count)), num_clients, statuses)
    for name in HUGE:
        for _ in range(num_huge):
            statuses += await throw(server.url, HUGE[name](), HUGE_PATIENCE_S)
    growth_mib = sum(peak - before[pid] for pid, peak in _peak_bytes(server).items() if pid in before) / 2**20
    idle_s = await server.seconds_until_idle(30)
    after = await ask(server.url, {**HELLO, "model": MODEL})
    row = Row("B2", f"wire fuzz: {count} damaged conversations and {num_huge} × {len(HUGE)} huge ones")
    row.note("statuses", " ".join(f"{status}:{number}" for status, number in sorted(statuses.items())))
    num_bad = sum(number for status, number in statuses.items() if status >= 500)
    row.check("5xx", num_bad, passes=not num_bad)
    row.check("answers", statuses.total(), passes=statuses.total() >= count // 3)
    row.check(f"peak RSS +MiB (≤ {MAX_GROWTH_MIB})", growth_mib, passes=growth_mib <= MAX_GROWTH_MIB)
    row.check("idle after s", idle_s, passes=idle_s < 30)
    row.check("answers afterwards", after.status, passes=after.status == 200)
    return row


def _peak_bytes(server: Server) -> dict[int, int]:
    """Peak memory by process, since the last call. Source: proc_pid_clear_refs(5), where 5 resets the peak."""
    found = {process.pid: status_bytes(process.pid, "VmHWM") for process in server.processes()}
    for pid in found:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return found


async def _throw_all(url: str, cases: Iterator[bytes], num_clients: int, statuses: Counter[int]) -> None:
    async def work() -> None:
        for case in cases:
            third = 1 + len(case) // 3
            pieces = (case[at : at + third] for at in range(0, len(case), third))
            statuses.update(await throw(url, pieces, PATIENCE_S))

    await asyncio.gather(*(work() for _ in range(num_clients)))


async def throw(url: str, pieces: Iterator[bytes], patience_s: float) -> Counter[int]:
    """Send pieces for as long as the server takes them; the statuses of what it answers."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    received = bytearray()

    async def read() -> None:
        while data := await reader.read(1 << 16):
            received.extend(data)
            nonlocal heard_s
            heard_s = time.monotonic()

    heard_s = time.monotonic()
    reading = asyncio.create_task(read())
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 30)
            if reading.done():
                break
        heard_s = time.monotonic()
        while (left_s := heard_s + patience_s - time.monotonic()) > 0 and not reading.done():
            await asyncio.wait([reading], timeout=left_s)
    except (OSError, TimeoutError):
        await asyncio.wait([reading], timeout=1)
    finally:
        reading.cancel()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await reading
        writer.close()
    return Counter(int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", received))
