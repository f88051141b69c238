"""Liveness and readiness of the server. Knows no HTTP.

The server is live while its requests make progress: a platform should restart it otherwise. It is ready while it takes
requests. Both count from the engine's last message, not from the first probe: `Health.watch` pings a silent engine.
Next to read: `routes/status.py`.
"""

import asyncio
import time
from collections.abc import Callable

from quire.engine.process.client import EngineClient
from quire.server.supervisor import Supervisor

MAX_STALL_S = 30.0
"""The engine hangs if it has requests and ends no step within this time."""
MAX_SILENT_S = 8.0
"""An engine answers pings also while it computes."""
LOOK_EVERY_S = 1.0
"""An engine that has sent nothing for this time is pinged."""


class Health:
    """Answers to probes, from the times that `watch` and the engine's client noted."""

    def __init__(self, supervisor: Supervisor, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: the clock of the client's times."""
        self._supervisor = supervisor
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None

    async def watch(self) -> None:
        """Ping a silent engine until cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            if self._asking is not None:
                self._asking.cancel()

    def stall_s(self) -> float:
        """Return the seconds without a step while there are requests; 0 without requests or while the engine starts."""
        if not self._supervisor.is_ready or not self._supervisor.client.num_requests:
            return 0.0
        return max(0.0, self._clock() - self._supervisor.client.progress_s)

    def is_stalled(self) -> bool:
        """Return whether requests make no progress."""
        return self.stall_s() >= MAX_STALL_S

    def silence_s(self) -> float:
        """Return the seconds since the engine's last message."""
        return max(0.0, self._clock() - self._supervisor.client.last_heard_s)

    def answers(self) -> bool:
        """Return whether the engine runs and answers in time."""
        return self._supervisor.is_ready and self.silence_s() < MAX_SILENT_S

    def _look(self) -> None:
        if self._asking is None and self._supervisor.is_ready and self.silence_s() >= LOOK_EVERY_S:
            self._asking = asyncio.create_task(self._ask(self._supervisor.client), name="quire-ping")
            # The engine may die meanwhile; without this, asyncio logs an exception that was never retrieved.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _ask(self, client: EngineClient) -> None:
        try:
            await client.ping()
        finally:
            self._asking = None
