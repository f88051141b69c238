"""`FairPool`: threads beside the event loop in which callers take turns; `WorkPools`: one for each kind of work.

Kinds are apart, so that a short request never waits for a long text, or for a grammar that takes its whole deadline.
Knows neither HTTP nor the engine. Next to read: `front_end.py`, what is done in these threads.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from quire.errors import QueueFullError
from quire.server.request_record import Caller
from quire.turns import Turns

LONG_BYTES = 4096
"""A larger body is long work: to render and tokenise 4 KiB of text takes 2 ms."""
MAX_WAITING_BYTES = 64 << 20
"""Bytes of bodies whose work waits in one pool."""
RESERVED_SHARE = 4
"""A quarter of them stays free of any one caller."""
LEAST_BYTES = 64 << 10
"""Bytes that each waiting job counts at least: at most 1,024 wait in a pool, 768 of one caller."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(slots=True, eq=False)
class _Job:
    """A call that waits or runs. `num_bytes`: what it counts while it waits."""

    caller: str
    function: Callable[[], Any]
    num_bytes: int
    result: "asyncio.Future[Any]"


class FairPool:
    """Threads in which callers take turns. One caller's jobs run one at a time, beside those of another caller."""

    NUM_THREADS = 2

    def __init__(self, name: str, max_waiting_bytes: float = MAX_WAITING_BYTES) -> None:
        """`name`: of the threads."""
        self._threads = ThreadPoolExecutor(self.NUM_THREADS, name)
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting = Turns[_Job]()
        self._num_bytes: Counter[str] = Counter()
        """Of waiting jobs, by caller."""
        self._running: set[str] = set()
        """Callers that have a job in a thread."""

    async def run(self, caller: str, function: Callable[[], _R], num_bytes: int = 0) -> _R:
        """Call a function in a thread when it is the caller's turn. If cancelled before, it is not called.

        Raises: QueueFullError if too much waits; the errors of the function.
        """
        job = _Job(caller, function, max(num_bytes, LEAST_BYTES), asyncio.get_running_loop().create_future())
        self._check_room(job)
        self._waiting.add(caller, job)
        self._num_bytes[caller] += job.num_bytes
        self._start()
        try:
            result: _R = await job.result
        except asyncio.CancelledError:
            if self._waiting.remove(lambda waiting: waiting is job) is not None:
                self._uncount(job)
            raise
        return result

    def _check_room(self, job: _Job) -> None:
        own, total, most = self._num_bytes[job.caller], self._num_bytes.total(), self._max_waiting_bytes
        share = most * (1 - 1 / RESERVED_SHARE)
        # A job larger than the limit waits alone.
        if (total and total + job.num_bytes > most) or (own and own + job.num_bytes > share):
            raise QueueFullError("the server is busy: too many requests wait to be prepared; try again later")

    def _uncount(self, job: _Job) -> None:
        self._num_bytes[job.caller] -= job.num_bytes
        if not self._num_bytes[job.caller]:
            del self._num_bytes[job.caller]

    def _start(self) -> None:
        """Start jobs of callers that have none running, in their turn, while threads are free."""
        while len(self._running) < self.NUM_THREADS and (taken := self._waiting.take(busy=self._running)) is not None:
            caller, job = taken
            self._uncount(job)
            self._running.add(caller)
            self._threads.submit(self._call, job, asyncio.get_running_loop())

    def _call(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        result, error = None, None
        try:
            if not job.result.cancelled():
                result = job.function()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._end, job, result, error)

    def _end(self, job: _Job, result: Any, error: BaseException | None) -> None:
        if not job.result.done():  # else its caller has left
            job.result.set_result(result) if error is None else job.result.set_exception(error)
        self._running.remove(job.caller)
        self._waiting.end(job.caller)
        self._start()


class WorkPools:
    """The threads of a server, for all of its models."""

    def __init__(self) -> None:
        self._short, self._long = FairPool("quire-text"), FairPool("quire-long")
        self._grammars = FairPool("quire-grammar")
        self._answers = FairPool("quire-answer", math.inf)

    async def prepare(self, caller: Caller, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call a function that reads the body of the caller's request. Raises: as `FairPool.run`."""
        pool = self._long if caller.num_bytes > LONG_BYTES else self._short
        return await pool.run(caller.client_id, lambda: function(*args, **kwargs), caller.num_bytes)

    async def check_grammar(self, caller: Caller, check: Callable[[], _R]) -> _R:
        """Call a function that waits for a grammar's check. Raises: as `FairPool.run`."""
        return await self._grammars.run(caller.client_id, check)

    async def write(self, client_id: str, write: Callable[[], _R]) -> _R:
        """Call a function that writes a long answer; it is never refused."""
        return await self._answers.run(client_id, write)
