"""F8 of the fault table: the processes of a server are suspended while answers are generated.

That no duration depends on the wall clock is checked by `tests/guards/test_clocks.py`. Next to read: `server.py`.
"""

import asyncio

import psutil

from benchmarks.soak.client import Seen, ask, chat_body, get
from benchmarks.soak.loads import HELLO, is_healthy
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, serving

NUM_STREAMS = 2


async def suspended(model: str, *, suspend_s: float = 30.0, num_tokens: int = 200) -> Row:
    """F8: answers that were running are complete after the pause, and the server is healthy."""
    row = Row("F8", f"all processes suspended {suspend_s:g} s")
    with serving(model) as server:
        await ask(server.url, HELLO)
        tasks = await _running(server, num_tokens)
        processes: list[psutil.Process] = server.processes()
        for process in processes:
            process.suspend()
        await asyncio.sleep(suspend_s)
        for process in reversed(processes):
            process.resume()
        seen = await asyncio.gather(*tasks)
        good = sum(item.is_good and item.num_tokens == num_tokens for item in seen)
        row.check("answers complete", f"{good}/{NUM_STREAMS}", passes=good == NUM_STREAMS)
        page = await get(server.url, "/metrics")
        lines = [line for line in page.text.splitlines() if not line.startswith("#")]
        negative = [line for line in lines if line.rpartition(" ")[2].startswith("-")]
        row.check("negative metrics", "; ".join([str(len(negative)), *negative[:2]]),
                  passes=page.status == 200 and bool(lines) and not negative)  # fmt: skip
        healthy = await is_healthy(server)
        row.check("healthy", healthy, passes=healthy)
    return row


async def _running(server: Server, num_tokens: int) -> "list[asyncio.Task[Seen]]":
    """Start answers and wait until their first tokens are computed."""
    bodies = [chat_body(f"Tell me a story. {index}", num_tokens) for index in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(ask(server.url, body)) for body in bodies]
    while (await server.metrics()).value("quire_requests_running") < NUM_STREAMS:
        if all(task.done() for task in tasks):
            raise RuntimeError(f"the answers ended before the pause: {[task.result().error for task in tasks]}")
        await asyncio.sleep(0.01)
    return tasks
