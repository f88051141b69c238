"""Whether the server makes progress, and whether it can take work. Knows no HTTP.

Live is about progress: a server whose work does not move should be restarted by its platform. Ready is about the
next request. Next to read: `routes/health.py`.
"""

import asyncio
import time
from collections.abc import Callable

from quire.engine.process.client import EngineClient
from quire.engine.process.messages import Statistics
from quire.server.admission import Admission
from quire.server.supervisor import Supervisor

MAX_STALL_S = 30.0
"""No step of the engine ends within this time while requests wait for one: something hangs."""
MAX_PING_S = 8.0
FRESH_S = 1.0
"""Who was heard of so recently is not asked again."""


class Health:
    """Answers probes, as often as they come: at most one question to the engine is under way."""

    def __init__(
        self, supervisor: Supervisor, admission: Admission, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._supervisor = supervisor
        self._admission = admission
        self._clock = clock
        self._seen: Statistics | None = None
        self._seen_s = 0.0
        self._ping: asyncio.Task[None] | None = None
        self._asked_s = 0.0

    def stall_s(self) -> float:
        """Seconds without any step while there was work; 0 if all is well, or the engine is being started."""
        now_s = self._clock()
        if not self._supervisor.is_ready or not self._supervisor.client.num_requests:
            self._seen = None
            return 0.0
        # Each message from a step brings an object of its own.
        statistics = self._supervisor.client.statistics
        if statistics is not self._seen:
            self._seen, self._seen_s = statistics, now_s
        return now_s - max(self._seen_s, self._admission.busy_since_s)

    def is_stalled(self) -> bool:
        """Whether work hangs."""
        return self.stall_s() >= MAX_STALL_S

    async def answers(self) -> bool:
        """Whether the engine's process answers in time. Waits for it, but no longer than `MAX_PING_S` in all."""
        if not self._supervisor.is_ready:
            return False
        client = self._supervisor.client
        if asyncio.get_running_loop().time() - client.last_heard_s < FRESH_S:
            return True
        if self._ping is None:
            self._ping = asyncio.create_task(self._ask(client), name="quire-ping")
            # Nobody may be waiting any more when the engine dies.
            self._ping.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._asked_s = self._clock()
        ping = self._ping
        left_s = max(0.0, self._asked_s + MAX_PING_S - self._clock())
        done, _ = await asyncio.wait({ping}, timeout=left_s)
        return bool(done) and not ping.cancelled() and ping.exception() is None

    async def _ask(self, client: EngineClient) -> None:
        try:
            await client.ping()
        finally:
            self._ping = None
