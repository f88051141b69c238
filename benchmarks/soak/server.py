"""A real `quire serve` to be put under load, and what can be seen of it from outside.

Next to read: `client.py`, `../server_process.py`.
"""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.server_process import POLL_S, ServerProcess, quire_serve
from benchmarks.soak.client import Seen, get
from quire.cli.top import MetricsPage


class Server(ServerProcess):
    """A server whose model is called "soak"."""

    def __init__(
        self,
        model: str,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        key: str | None = None,
    ) -> None:
        """`prefix`: a command that runs the rest of its line in its own place. `key`: that of the server's metrics."""
        self.key = key
        super().__init__([*prefix, *quire_serve(model, *arguments, name="soak")], environment)

    def resident_bytes(self) -> int:
        """Memory of server and engine."""
        return sum(process.memory_info().rss for process in self.processes())

    def num_files(self) -> int:
        """Open descriptors of server and engine."""
        return sum(process.num_fds() for process in self.processes())

    def num_threads(self) -> int:
        """Threads of server and engine."""
        return sum(process.num_threads() for process in self.processes())

    async def metrics(self) -> MetricsPage:
        """Read `/metrics`. Raises: RuntimeError if it does not answer."""
        seen = await get(self.url, "/metrics", key=self.key)
        if seen.status != 200:
            raise RuntimeError(f"/metrics answers {seen.status} {seen.error or ''}")
        return MetricsPage(seen.text, seen.ended_s)

    async def num_under_way(self) -> int:
        """Requests that are somewhere in server or engine, and KV blocks in use: 0 at rest."""
        metrics = await self.metrics()
        names = ("quire_requests_running", "quire_requests_waiting", "quire_admitted_requests")
        return int(sum(metrics.value(name) for name in names) + metrics.value("quire_kv_blocks", state="used"))

    async def seconds_until_idle(self, limit_s: float = 60.0) -> float:
        """Return the seconds until no request is in flight and no KV block in use; infinite beyond the limit."""
        start_s = time.perf_counter()
        while await self.num_under_way():
            if time.perf_counter() - start_s > limit_s:
                return float("inf")
            await asyncio.sleep(POLL_S)
        return time.perf_counter() - start_s

    async def seconds_until(self, path: str, status: int, limit_s: float = 60.0) -> float:
        """Return the seconds until a GET has this status; infinite beyond the limit."""
        start_s = time.perf_counter()
        while True:
            seen = await get(self.url, path, timeout_s=limit_s, key=self.key)
            passed_s = time.perf_counter() - start_s
            if seen.status == status:
                return passed_s
            if passed_s > limit_s or not self.is_running:
                return float("inf")
            await asyncio.sleep(POLL_S)

    async def wait(self, limit_s: float = 60.0) -> int | None:
        """The exit code; None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self.process.wait, limit_s)
        return None


@contextlib.contextmanager
def serving(
    model: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    key: str | None = None,
) -> Iterator[Server]:
    """A server that is ready; gone at the end."""
    server = Server(model, arguments, environment, prefix, key)
    try:
        yield server
    finally:
        server.kill()


async def probes(server: Server, path: str, every_s: float, into: list[Seen]) -> Any:
    """Look at a path again and again, until cancelled."""
    while True:
        into.append(await get(server.url, path, key=server.key))
        await asyncio.sleep(every_s)


def status_bytes(pid: int, field: str) -> int:
    """Return a size from /proc/PID/status. Raises: RuntimeError."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/{pid}/status has no {field}")
