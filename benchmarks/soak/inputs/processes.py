"""Peak memory of a server, read from /proc, and clients for many small requests. Next to read: `../server.py`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx2

from benchmarks.soak.server import Server

_T = TypeVar("_T")
Work = Callable[[httpx2.AsyncClient, _T], Awaitable[None]]
MIB = 1 << 20
NUM_CLIENTS = 8
_RESET_PEAK = "5"
"""Value for /proc/PID/clear_refs that resets the peak: proc_pid_clear_refs(5)."""


@dataclass
class Growth:
    """Once the body is over: bytes that the processes of the beginning took at most beyond what they had then, and what
    those took at most that were started since and are still there."""

    peak_bytes: int = 0
    new_bytes: int = 0

    @property
    def mib(self) -> float:
        """`peak_bytes` in MiB."""
        return self.peak_bytes / MIB


@contextlib.contextmanager
def growth_of(server: Server) -> Iterator[Growth]:
    """The peak of what is resident while the body runs, per process and summed."""
    before: dict[int, int] = {}
    for process in server.processes():
        Path(f"/proc/{process.pid}/clear_refs").write_text(_RESET_PEAK)
        before[process.pid] = _peak_bytes(process.pid)
    growth = Growth()
    yield growth
    after = {process.pid: _peak_bytes(process.pid) for process in server.processes()}
    growth.peak_bytes = sum(after[pid] - before[pid] for pid in after if pid in before)
    growth.new_bytes = sum(after[pid] for pid in after if pid not in before)


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmHWM: it has ended")


async def share(url: str, items: Iterable[_T], work: Work[_T]) -> None:
    """Work through the items with several clients at once, each with a connection of its own."""
    waiting = iter(items)

    async def one() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            for item in waiting:
                await work(client, item)

    await asyncio.gather(*(one() for _ in range(NUM_CLIENTS)))
