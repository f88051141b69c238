"""The fault table: what a server must survive. Each function is one row and starts the servers that it needs.

Next to read: `server.py`, `tests/faults/injection.py`.
"""

import asyncio
import random
import time
from collections.abc import Sequence

from benchmarks.soak.client import Manners, Seen, ask, chat_body, get
from benchmarks.soak.loads import HELLO, is_healthy
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, serving

KILLS_PER_SERVER = 4
"""The fifth within a minute ends the server, which is tested by itself."""


def streams(server: Server, count: int, num_tokens: int) -> list["asyncio.Task[Seen]"]:
    """Start `count` answers."""
    bodies = [chat_body(f"Tell me a story. {index}", num_tokens) for index in range(count)]
    return [asyncio.create_task(ask(server.url, body)) for body in bodies]


async def until_running(tasks: Sequence["asyncio.Task[Seen]"], server: Server, count: int) -> None:
    """Wait until `count` sequences run."""
    while (await server.metrics()).value("quire_requests_running") < count and not all(task.done() for task in tasks):
        await asyncio.sleep(0.01)


async def kill_engine(model: str, *, repeat: int = 8, num_streams: int = 4) -> Row:
    """F2: kill -9 of the engine's process at random moments."""
    row = Row("F2", f"kill -9 engine × {repeat}")
    choices = random.Random(0)
    error_s, ready_s, num_silent = [0.0], [0.0], 0
    while len(ready_s) <= repeat:
        with serving(model) as server:
            for _ in range(min(KILLS_PER_SERVER, repeat + 1 - len(ready_s))):
                tasks = streams(server, num_streams, 1900)
                await until_running(tasks, server, 1)
                await asyncio.sleep(choices.uniform(0, 1))
                server.engine().kill()
                killed_s = time.perf_counter()
                seen = await asyncio.gather(*tasks)
                num_silent += sum(item.is_good or item.error is None for item in seen)
                error_s.append(max(item.ended_s for item in seen) - killed_s)
                await server.seconds_until("/health/ready", 200)
                ready_s.append(time.perf_counter() - killed_s)
                if not await is_healthy(server):
                    ready_s.append(float("inf"))
    row.check("in flight without an error", num_silent, passes=not num_silent)
    row.check("error after s (≤ 2)", max(error_s), passes=max(error_s) <= 2)
    row.check("ready again after s (≤ 10)", max(ready_s), passes=max(ready_s) <= 10)
    with serving(model) as server:
        for _ in range(KILLS_PER_SERVER):
            server.engine().kill()
            await server.seconds_until("/health/ready", 503)
            await server.seconds_until("/health/ready", 200)
        server.engine().kill()
        code = await server.wait()
    row.check("exit code after 5 (≠ 0)", code, passes=bool(code) and "the 5th time within" in server.stderr)
    return row


async def stopped_engine(model: str, *, stop_s: float = 60.0) -> Row:
    """F4: SIGSTOP of the engine's process while it computes."""
    row = Row("F4", f"SIGSTOP engine {stop_s:g} s")
    with serving(model) as server:
        await ask(server.url, HELLO)
        tasks = streams(server, 2, 300)
        await until_running(tasks, server, 2)
        engine = server.engine()
        engine.suspend()
        stopped_s = time.perf_counter()
        try:
            # These are the first probes, so they count from the engine's last message.
            await asyncio.sleep(10)
            ready = await get(server.url, "/health/ready")
            await asyncio.sleep(28 - (time.perf_counter() - stopped_s))
            early = await get(server.url, "/health/live")
            await server.seconds_until("/health/live", 503, stop_s)
            live_s = time.perf_counter() - stopped_s
            await asyncio.sleep(max(0.0, stop_s - live_s))
        finally:
            engine.resume()
        recovered_s = await server.seconds_until("/health/ready", 200, 10)
        seen = await asyncio.gather(*tasks)
        row.check("first probe of ready, after 10 s (503)", ready.status, passes=ready.status == 503)
        row.check("first probe of live, after 28 s (200)", early.status, passes=early.status == 200)
        row.check("live says 503 after s (≤ 31)", live_s, passes=live_s <= 31)
        row.check("recovered after s", recovered_s, passes=recovered_s < float("inf"))
        exact = sum(item.is_good and item.num_tokens == 300 for item in seen)
        row.check("answers complete, once", f"{exact}/2", passes=exact == 2)
        row.check("healthy", await is_healthy(server), passes=await is_healthy(server))
    return row


async def cut_links(model: str | Server, *, count: int = 200, num_tokens: int = 400, max_sent: int = 400) -> Row:
    """F5: the connection is cut after k bytes of the request or of the answer, politely or by a reset."""
    row = Row("F5", f"cut after k bytes, {count} values of k, FIN and RST")
    if isinstance(model, str):
        with serving(model) as server:
            return await cut_links(server, count=count, num_tokens=num_tokens, max_sent=max_sent)
    server = model
    await ask(server.url, HELLO)
    choices = random.Random(0)
    idle: list[float] = []
    for index in range(count):
        manners = Manners(
            hang_up_after_sent=choices.randint(0, max_sent) if index % 4 == 0 else None,
            hang_up_after_received=choices.randint(1, 4000) if index % 4 else None,
            resets=index % 2 == 0,
        )
        await ask(server.url, chat_body(f"Tell me a story. {index}", num_tokens), manners)
        idle.append(await server.seconds_until_idle(10))
    whole = await ask(server.url, HELLO)
    row.check("idle after s, worst (≤ 0.25)", max(idle), passes=max(idle) <= 0.25)
    row.check("healthy", whole.is_good, passes=whole.is_good)
    return row


async def suspended(model: str, *, suspend_s: float = 30.0, num_tokens: int = 200) -> Row:
    """F8: all processes are suspended while answers are generated; these are complete after the pause."""
    row = Row("F8", f"all processes suspended {suspend_s:g} s")
    with serving(model) as server:
        await ask(server.url, HELLO)
        tasks = streams(server, 2, num_tokens)
        await until_running(tasks, server, 2)
        server.pause()
        await asyncio.sleep(suspend_s)
        server.resume()
        seen = await asyncio.gather(*tasks)
        good = sum(item.is_good and item.num_tokens == num_tokens for item in seen)
        row.check("answers complete", f"{good}/2", passes=good == 2)
        page = await get(server.url, "/metrics")
        lines = [line for line in page.text.splitlines() if not line.startswith("#")]
        negative = [line for line in lines if line.rpartition(" ")[2].startswith("-")]
        row.check("negative metrics", "; ".join([str(len(negative)), *negative[:2]]),
                  passes=page.status == 200 and bool(lines) and not negative)  # fmt: skip
        healthy = await is_healthy(server)
        row.check("healthy", healthy, passes=healthy)
    return row
