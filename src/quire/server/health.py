"""Whether the server makes progress, and whether it can take work. Knows no HTTP.

Live is about progress: a server whose work does not move should be restarted by its platform. Ready is about the
next request. Both count from the engine's last sign, not from the first probe: `Health.watch` asks an engine that is
silent. Time in which this process did not run itself says nothing about the engine and does not count.
Next to read: `routes/health.py`.
"""

import asyncio
import time
from collections.abc import Callable

from quire.engine.process.client import EngineClient
from quire.server.supervisor import Supervisor

MAX_STALL_S = 30.0
"""No step of the engine ends within this time while requests wait for one: something hangs."""
MAX_SILENT_S = 8.0
"""An engine answers questions also while it computes."""
LOOK_EVERY_S = 1.0
"""An engine that said nothing for so long is asked for a sign."""
MAX_PAUSE_S = 5.0
"""A look that comes so late means that this process stood still: it was stopped, or its machine slept."""


class Health:
    """Answers probes, as often as they come, from what `watch` and the client noted."""

    def __init__(self, supervisor: Supervisor, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: that of the client's times."""
        self._supervisor = supervisor
        self._clock = clock
        self._looked_s: float | None = None
        self._resumed_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def watch(self) -> None:
        """Look after the engine until cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            if self._asking is not None:
                self._asking.cancel()

    def stall_s(self) -> float:
        """Seconds without any step while there was work; 0 if there is none, or the engine is being started."""
        if not self._supervisor.is_ready or not self._supervisor.client.num_requests:
            return 0.0
        return self._since(self._supervisor.client.progress_s)

    def is_stalled(self) -> bool:
        """Whether work hangs."""
        return self.stall_s() >= MAX_STALL_S

    def silence_s(self) -> float:
        """Seconds since the engine's process said anything."""
        return self._since(self._supervisor.client.last_heard_s)

    def answers(self) -> bool:
        """Whether the engine is there and answers in time."""
        return self._supervisor.is_ready and self.silence_s() < MAX_SILENT_S

    def _since(self, moment_s: float) -> float:
        now_s = self._note_time()
        return max(0.0, now_s - max(moment_s, self._resumed_s))

    def _note_time(self) -> float:
        # Probes look here too: after a pause they may come before `watch`.
        now_s = self._clock()
        if self._looked_s is not None and now_s - self._looked_s > MAX_PAUSE_S:
            self._resumed_s = self._looked_s = now_s
        return now_s

    def _look(self) -> None:
        self._looked_s = self._note_time()
        if self._asking is not None or not self._supervisor.is_ready:
            return
        client = self._supervisor.client
        if self._looked_s - client.last_heard_s >= LOOK_EVERY_S:
            self._asking = asyncio.create_task(self._ask(client), name="quire-ping")
            # Nobody waits for it, and the engine may die.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _ask(self, client: EngineClient) -> None:
        try:
            await client.ping()
        finally:
            self._asking = None
