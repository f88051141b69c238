"""F8 of the fault table: the clocks jump and the processes stand still while answers are generated.

The wall clock is moved by ±1 day and the monotonic clock forward by ten minutes, by a library that lies between the
server's processes and the C library (`shifted_clock.cpp`, compiled here); both while requests run.
Next to read: `shifted_clock.cpp`, `server.py`.
"""

import asyncio
import contextlib
import mmap
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.soak.client import Seen, ask, chat_body, get
from benchmarks.soak.inputs.plain_http import Answer, Client, connected
from benchmarks.soak.loads import HELLO, is_healthy
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, serving

SOURCE = Path(__file__).with_name("shifted_clock.cpp")
DAY_S = 86_400
SLEEP_S = 600
PER_MINUTE = 4
FORMAT = "=qq"
NUM_STREAMS = 2


class Clocks:
    """What a server's clocks read beyond the truth; both shifts are 0 at first."""

    def __init__(self, library: Path, file: Path) -> None:
        self.environment = {"LD_PRELOAD": str(library), "QUIRE_SHIFTED_CLOCK": str(file)}
        with file.open("wb") as out:
            out.write(struct.pack(FORMAT, 0, 0))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), struct.calcsize(FORMAT))

    def shift(self, *, wall_s: int = 0, monotonic_s: int = 0) -> None:
        """From now on the clocks read so much more."""
        self._memory[:] = struct.pack(FORMAT, wall_s * 10**9, monotonic_s * 10**9)


def missing_compiler() -> str | None:
    """Why there can be no shifted clocks here; None if there can."""
    return None if shutil.which("g++") or shutil.which("c++") else "there is no C++ compiler"


@contextlib.contextmanager
def shifted_clocks() -> Iterator[Clocks]:
    """Clocks for one server. Raises: RuntimeError without a compiler, or if the library does not compile."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError(str(missing_compiler()))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "shifted_clock.so"
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile: {done.stderr[:300]}")
        yield Clocks(library, Path(folder) / "shifts")


async def moved_clocks(
    model: str, *, suspend_s: float = 30.0, num_tokens: int = 200, environment: dict[str, str] | None = None
) -> Row:
    """F8."""
    more = environment or {}
    row = Row("F8", f"wall clock ±1 day, monotonic clock +{SLEEP_S} s, all processes suspended {suspend_s:g} s")
    if missing_compiler() is None:
        with shifted_clocks() as clocks, serving(model, environment={**more, **clocks.environment}) as server:
            await _jumps(row, server, clocks, num_tokens)
            await _passed_deadline(row, server, clocks)
        with shifted_clocks() as clocks:
            options = ("--requests-per-minute", str(PER_MINUTE))
            with serving(model, *options, environment={**more, **clocks.environment}) as server:
                await _rate_limits(row, server, clocks)
    else:
        row.check("clocks:", missing_compiler(), passes=False)
    with serving(model, environment=more) as server:
        await _suspended(row, server, suspend_s, num_tokens)
    return row


async def _jumps(row: Row, server: Server, clocks: Clocks, num_tokens: int) -> None:
    await ask(server.url, HELLO)
    jumps = {"+1 day": (DAY_S, 0), "-1 day": (-DAY_S, 0), f"monotonic +{SLEEP_S} s": (0, SLEEP_S)}
    for name, (wall_s, monotonic_s) in jumps.items():
        tasks = await _running(server, num_tokens)
        clocks.shift(wall_s=wall_s, monotonic_s=monotonic_s)
        probes = [(await get(server.url, path)).status for path in ("/health/ready", "/health/live")]
        seen = await asyncio.gather(*tasks)
        # A monotonic clock never goes back: that shift is the last one.
        good = sum(item.is_good and item.num_tokens == num_tokens for item in seen)
        row.check(f"{name}: answers complete", f"{good}/{NUM_STREAMS}", passes=good == NUM_STREAMS)
        row.check("ready, live", probes, passes=probes == [200, 200])
        async with connected(server.url) as client:
            await _judge_answer(row, client, time.time() + wall_s, num_tokens)
        await _judge_metrics(row, server)


async def _judge_answer(row: Row, client: Client, now_s: float, num_tokens: int) -> None:
    """One answer with its date and its usage."""
    answer = await client.ask("POST", "/v1/chat/completions", chat_body("Hello.", 8, stream=False))
    usage = (answer.json or {}).get("usage", {})
    counts = [usage.get(name, -1) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    is_sum = counts[0] > 0 and counts[1] == 8 and counts[2] == counts[0] + counts[1]
    row.check("usage", counts, passes=answer.status == 200 and is_sum)
    off_s = (answer.json or {}).get("created", 0) - now_s
    row.check("`created` beside the clock s", off_s, passes=abs(off_s) < 60)


async def _judge_metrics(row: Row, server: Server) -> None:
    page = await get(server.url, "/metrics")
    lines = [line for line in page.text.splitlines() if not line.startswith("#")]
    negative = [line for line in lines if line.rpartition(" ")[2].startswith("-")]
    row.check("negative metrics", "; ".join([str(len(negative)), *negative[:2]]),
              passes=page.status == 200 and bool(lines) and not negative)  # fmt: skip


async def _passed_deadline(row: Row, server: Server, clocks: Clocks) -> None:
    """Time that the monotonic clock counts is time: a request whose own limit passed meanwhile ends by it."""
    tasks = await _running(server, 1900)
    clocks.shift(monotonic_s=SLEEP_S + 1801)
    seen = await asyncio.gather(*tasks)
    ended = [item.error for item in seen]
    row.check("beyond --request-timeout-s", ended, passes=ended == ["request_timeout"] * NUM_STREAMS)
    row.check("healthy", await is_healthy(server), passes=await is_healthy(server))


async def _rate_limits(row: Row, server: Server, clocks: Clocks) -> None:
    async with connected(server.url) as client:

        async def one() -> Answer:
            return await client.ask("POST", "/v1/chat/completions", chat_body("Hello.", 1, stream=False))

        for _ in range(2 * PER_MINUTE):
            last = await one()
        answers = {"before": last}
        for name, wall_s in (("+1 day", DAY_S), ("-1 day", -DAY_S)):
            clocks.shift(wall_s=wall_s)
            answers[name] = await one()
        statuses = {name: (answer.status, answer.headers.get("retry-after", "")) for name, answer in answers.items()}
        most_s = 60 / PER_MINUTE
        sane = all(
            status == 429 and after.isdigit() and 1 <= int(after) <= most_s for status, after in statuses.values()
        )
        row.check(f"used up, Retry-After (1 to {most_s:g})", " ".join(f"{name} {status} {after}"
                  for name, (status, after) in statuses.items()), passes=sane)  # fmt: skip
        clocks.shift(monotonic_s=SLEEP_S)
        after = await one()
        row.check(f"monotonic +{SLEEP_S} s", after.status, passes=after.status == 200)


async def _suspended(row: Row, server: Server, suspend_s: float, num_tokens: int) -> None:
    """Stop all processes for a while, as a machine that sleeps does."""
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
    row.check("suspended: answers complete", f"{good}/{NUM_STREAMS}", passes=good == NUM_STREAMS)
    await _judge_metrics(row, server)
    row.check("healthy", await is_healthy(server), passes=await is_healthy(server))


async def _running(server: Server, num_tokens: int) -> "list[asyncio.Task[Seen]]":
    """Answers of which the first tokens are computed."""
    bodies = [chat_body(f"Tell me a story. {index}", num_tokens) for index in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(ask(server.url, body)) for body in bodies]
    while (await server.metrics()).value("quire_requests_running") < NUM_STREAMS:
        if all(task.done() for task in tasks):
            raise RuntimeError(f"the answers ended before the clock moved: {[task.result().error for task in tasks]}")
        await asyncio.sleep(0.01)
    return tasks
