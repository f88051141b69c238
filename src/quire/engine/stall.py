"""`Stall`: steps that compute nothing while requests wait: for adapters that are read, else the scheduler is stuck.

Adapters of waiting requests are read beside the steps of others; a request joins when its adapter can be used.
Next to read: `runtime/adapter_pool.py`.
"""

from itertools import islice
from typing import TYPE_CHECKING

from quire.errors import EngineError
from quire.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.parallel.executor import Executor

MAX_IDLE_STEPS = 1000
"""Steps in a row that compute nothing while requests wait: more means that the scheduler is stuck."""
MAX_READ_AHEAD = 2
"""Adapters of waiting requests that are read, or were read, before a step needs them: their memory is beside
`lora_bytes`."""
MAX_LOOKED_AT = 64
"""Waiting requests that are looked at for them: bounds a step's cost when thousands wait."""
WAIT_S = 0.005


class Stall:
    """Attributes: `reads_adapters`: requests may have adapters; `num_steps`: idle steps since the last one that ran."""

    def __init__(self, executor: "Executor", scheduler: Scheduler, *, reads_adapters: bool) -> None:
        self._executor, self._scheduler = executor, scheduler
        self.reads_adapters = reads_adapters
        self.num_steps = 0

    def read_adapters(self, wait_s: float = 0.0) -> bool:
        """Let the executor read the adapters of the next requests; a request waits until its own has been read.

        `wait_s`: time to wait until one has been read. Returns: True if the next request waits for its own.
        """
        requests = self._scheduler.requests
        # Steps in flight may still begin running requests, whose adapters were read.
        used = [item.spec.adapter for item in requests.running]
        wanted = {adapter.digest: adapter for adapter in used if adapter is not None}
        most = len(wanted) + MAX_READ_AHEAD
        # The first one must be among them, wherever the queue keeps it.
        first = [requests.waiting.first()] if requests.waiting else []
        for request in (*first, *islice(requests.waiting, MAX_LOOKED_AT)):
            if (adapter := request.spec.adapter) is not None and len(wanted) < most:
                wanted[adapter.digest] = adapter
        requests.usable_adapters = self._executor.read_adapters(list(wanted.values()), wait_s)
        return any(map(requests.lacks_adapter, first))

    def note(self) -> None:
        """Take note of a step that computes nothing. Raises: EngineError if the scheduler is stuck."""
        if self.reads_adapters and self.read_adapters(WAIT_S):
            return
        self.num_steps += 1
        if self.num_steps > MAX_IDLE_STEPS and self._scheduler.num_waiting:
            raise EngineError(f"{self._scheduler.num_waiting} requests wait, but none can be scheduled")
