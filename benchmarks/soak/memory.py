"""F7 of the fault table: a cgroup with less memory than the server needs. It must say so at the start.

The limit needs root and a writable cgroup hierarchy. Next to read: `src/quire/memory_plan.py`.
"""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.soak.client import ask, chat_body
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, serving, status_bytes

SLOTS = 8
MODEL_LEN = 1024
POOL_BYTES = 512 << 20
SHARE = 0.8
CGROUPS = Path("/sys/fs/cgroup")
ENTER_CGROUP = (
    "import os, sys; print(os.getpid(), file=open(sys.argv[1] + '/cgroup.procs', 'w'));"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


async def limited_memory(model: str, *, pool_bytes: int = POOL_BYTES, num_rounds: int = 4) -> Row:
    """F7: a cgroup at 0.8 of the need, then a pool of the size that the refusal names."""
    row = Row("F7", f"memory limited to {SHARE:g} × the need")
    options = ["--max-num-seqs", str(SLOTS), "--max-model-len", str(MODEL_LEN)]
    with serving(model, *options, "--kv-cache-memory-bytes", str(pool_bytes)) as server:
        at_rest = sum(status_bytes(process.pid, "RssAnon") for process in server.processes())
    # All of the pool may be used.
    limit = int(SHARE * (at_rest + pool_bytes))
    with _limited(limit) as prefix:
        if prefix is None:
            row.check("cgroup:", "none can be made here", passes=True)
            return row
        fits = _refused(row, limit, model, [*options, "--kv-cache-memory-bytes", str(pool_bytes)], prefix)
        if fits is not None:
            await _serves(row, model, [*options, "--kv-cache-memory-bytes", str(fits)], prefix, num_rounds)
    return row


def _refused(row: Row, limit: int, model: str, options: list[str], prefix: list[str]) -> int | None:
    """Start where it cannot; returns the size of the pool that the refusal says would fit."""
    start_s = time.perf_counter()
    result = subprocess.run(
        [*prefix, sys.executable, "-m", "quire", "serve", model, "--port", "0", *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    took_s = time.perf_counter() - start_s
    lines = result.stderr.splitlines()
    says = len(lines) == 1 and re.search(r"needs? \d[\d.]* [KMG]iB", lines[0]) is not None and "cgroup" in lines[0]
    row.check(
        f"cgroup of {limit >> 20} MiB: refused, with the need, in one line, after s", took_s,
        passes=result.returncode == 4 and says,
    )  # fmt: skip
    found = re.search(r"--kv-cache-memory-bytes (\d+) fits", result.stderr)
    return int(found[1]) if found else None


async def _serves(row: Row, model: str, options: list[str], prefix: list[str], num_rounds: int) -> None:
    """With what the refusal says there is a server, and it bears load that fills all of it."""
    with serving(model, *options, prefix=prefix) as server:
        num_good = await _load(server, num_rounds)
        metrics = await server.metrics()
        deaths = metrics.value("quire_engine_deaths_total")
        used = 1 - metrics.value("quire_kv_blocks", state="free") / sum(
            metrics.value("quire_kv_blocks", state=state) for state in ("free", "used", "cached")
        )
        row.check("good at the size it names", f"{num_good}/{SLOTS * num_rounds}",
                  passes=num_good == SLOTS * num_rounds and server.is_running)  # fmt: skip
        row.check("deaths", deaths, passes=not deaths)
        row.check("of its pool written", round(used, 2), passes=used > 0.9)


async def _load(server: Server, num_rounds: int) -> int:
    """Send prompts without a common prefix, `SLOTS` at once; return the number of good answers."""
    num_good = 0
    for turn in range(num_rounds):
        bodies = [chat_body(f"{turn} {index} " + f"word{index} " * 250, 16) for index in range(SLOTS)]
        seen = await asyncio.gather(*(ask(server.url, body) for body in bodies))
        num_good += sum(item.is_good for item in seen)
    return num_good


@contextlib.contextmanager
def _limited(limit: int) -> Iterator[list[str] | None]:
    """A command that limits what it runs; None where this machine cannot."""
    for parent, name in ((CGROUPS / "memory", "memory.limit_in_bytes"), (CGROUPS, "memory.max")):
        folder = parent / f"quire-soak-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / name).exists():
                (folder / name).write_text(str(limit))
                yield [sys.executable, "-c", ENTER_CGROUP, str(folder)]
                return
        finally:
            _remove(folder)
    yield None


def _remove(folder: Path) -> None:
    """A cgroup goes when the last of its processes is gone, which is a moment after it was killed."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
