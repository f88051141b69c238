"""The load table: what a server must bear. Each function is one row, against a server that runs.

L1 is in `long.py`, L2 in `overload.py`. Next to read: `client.py`, `faults.py`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.soak.client import Seen, ask, chat_body, get
from benchmarks.soak.row import Row, at_percent
from benchmarks.soak.server import Server

HELLO = chat_body("Say hello.", 8)
LONG_TEXT = "the river runs to the sea and the wind carries the rain over the hills again "


def prompt_of(num_tokens: int, seed: int = 0) -> str:
    """Return a text of about `num_tokens` tokens of SmolLM2; texts of two seeds begin differently."""
    words = (f"{seed} " + LONG_TEXT * (num_tokens // 16 + 1)).split()
    return " ".join(words[: max(1, num_tokens - 30)])


async def gathered(server: Server, count: int, max_tokens: int, text: str = "Tell me a story.") -> list[Seen]:
    """Run `count` streams at once, to their end."""
    bodies = [chat_body(f"{text} {index}", max_tokens) for index in range(count)]
    return list(await asyncio.gather(*(ask(server.url, body) for body in bodies)))


@asynccontextmanager
async def background(*coroutines: object) -> AsyncIterator[list["asyncio.Task[Seen]"]]:
    """Run them beside the body, then end them."""
    tasks = [asyncio.ensure_future(item) for item in coroutines]  # type: ignore[call-overload]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def fairness(server: Server, *, num_streams: int = 4, prompt_tokens: int = 1900, max_tokens: int = 800) -> Row:
    """L4: a long prompt arrives while others stream."""
    row = Row("L4", f"fairness: {num_streams} streams, a prompt of {prompt_tokens} tokens arrives")
    await ask(server.url, HELLO)
    alone = await ask(server.url, chat_body(prompt_of(prompt_tokens, 1), 4))
    calm = await gathered(server, num_streams, max_tokens // 4, "Alone")
    median_s = at_percent([gap for item in calm for gap in item.gaps_s], 50)
    bodies = [chat_body(f"Tell me a story. {index}", max_tokens) for index in range(num_streams)]
    streams = [asyncio.create_task(ask(server.url, body)) for body in bodies]
    await asyncio.sleep(0.5)
    long_one = await ask(server.url, chat_body(prompt_of(prompt_tokens, 2), 4))
    seen = await asyncio.gather(*streams)
    begin_s, end_s = long_one.started_s, (long_one.piece_times or [long_one.ended_s])[0]
    gaps = [
        later - earlier
        for item in seen
        for earlier, later in zip(item.piece_times, item.piece_times[1:], strict=False)
        if later > begin_s and earlier < end_s
    ]
    all_good = all(item.is_good for item in (*seen, *calm, alone, long_one))
    row.check("failed", sum(not item.is_good for item in (*seen, long_one)), passes=all_good)
    if not all_good:
        return row
    first_alone_s, first_s = (item.piece_times[0] - item.started_s for item in (alone, long_one))
    p99_s = at_percent(gaps, 99)
    row.check("pieces of the streams meanwhile (≥ 20)", len(gaps), passes=len(gaps) >= 20)
    row.note("ITL median alone ms", 1e3 * median_s)
    row.check("ITL p99 ÷ that (≤ 4)", p99_s / median_s, passes=p99_s <= 4 * median_s)
    row.check("long TTFT ÷ alone (≤ 3)", first_s / first_alone_s, passes=first_s <= 3 * first_alone_s)
    return row


async def connections(server: Server, *, num_idle: int = 1000, num_active: int = 8, num_short: int = 20_000) -> Row:
    """L6: many connections that do nothing, then many that come and go."""
    row = Row("L6", f"{num_idle} idle connections + {num_active} active; {num_short} come and go")
    await ask(server.url, HELLO)
    await gathered(server, num_active, 100)
    calm_tokens_per_s = await _tokens_per_s(server, num_active)
    # The engine's process may commit memory of its KV pool meanwhile.
    front_end, num_files = server.processes()[0], server.num_files()
    before_bytes = front_end.memory_info().rss
    idle = await asyncio.gather(*(_idle_connection(server) for _ in range(num_idle)))
    per_kib = (front_end.memory_info().rss - before_bytes) / max(1, num_idle) / 1024
    tokens_per_s = await _tokens_per_s(server, num_active)
    for writer in idle:
        writer.close()
    row.check("throughput ÷ without (≥ 0.95)", tokens_per_s / calm_tokens_per_s,
              passes=tokens_per_s >= 0.95 * calm_tokens_per_s)  # fmt: skip
    row.check("KiB per connection (≤ 50)", per_kib, passes=per_kib <= 50)
    failed = 0
    for start in range(0, num_short, 100):
        batch = [get(server.url, "/health/live") for _ in range(min(100, num_short - start))]
        failed += sum(seen.status != 200 for seen in await asyncio.gather(*batch))
    row.check("short ones failed", failed, passes=not failed)
    await asyncio.sleep(1)
    more = server.num_files() - num_files
    row.check("descriptors more than before (≤ 2)", more, passes=more <= 2)
    return row


async def _idle_connection(server: Server) -> asyncio.StreamWriter:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /health/live HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return writer


async def _tokens_per_s(server: Server, num_clients: int, num_tokens: int = 100) -> float:
    start_s = time.perf_counter()
    seen = await gathered(server, num_clients, num_tokens)
    return sum(item.num_tokens for item in seen) / (time.perf_counter() - start_s)


async def is_healthy(server: Server) -> bool:
    """Return True if the server answers a request and a probe."""
    with contextlib.suppress(OSError):
        return (await ask(server.url, HELLO)).is_good and (await get(server.url, "/health/ready")).status == 200
    return False
