"""`CommitAhead`: the pages of the KV pool that are needed next are committed while no step runs.

A page's first write waits until the system has found and cleared it: 0.2 ms for a huge page, and 2 to 5 ms in virtual
machines whose host gives memory out lazily. With 64 streams that was a quarter of a step's time until the whole pool
had been written once. Committing the pool at start would take seconds and memory that few need.
Next to read: `cache_engine.py`.
"""

import ctypes
import os
import threading
import time
import weakref
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from quire.runtime.huge_pages import HUGE_PAGE_BYTES

AHEAD_BYTES = 64 << 20
PAUSE_S = 0.02
"""An engine without a step for so long has nothing to do."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14; `mmap` has no name for it."""


class CommitAhead:
    """Keeps some memory behind the highest address in use committed. Contents are not touched.

    A thread does it and ends when it is done. It waits while steps run, beside which it would take a processor from
    them, and runs only where no other process wants the processor either (SCHED_IDLE). Systems that cannot commit
    memory in advance do it at the first write.

    Attributes: `num_committed` bytes from the start were committed here; they may have been before.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """Shapes: memory [num_bytes], from `huge_pages.allocate`. Dtypes: uint8."""
        self.num_committed = 0
        self._memory = memory
        self._end = min(AHEAD_BYTES, len(memory))
        self._num_events = 0
        """Beginnings and ends of steps: odd while one runs."""
        self._thread: threading.Thread | None = None
        self._start()

    def begin_step(self, num_bytes: int) -> None:
        """A step begins; it and those before use the first `num_bytes`."""
        self._num_events += 1
        self._end = min(num_bytes + AHEAD_BYTES, len(self._memory))

    def end_step(self) -> None:
        """The step is over."""
        self._num_events += 1
        # Once in a while, and not for every page.
        if self._end - self.num_committed >= AHEAD_BYTES // 2:
            self._start()

    def commit_rest(self, seen_events: int) -> int | None:
        """Commit pages until another step begins. `seen_events`: beginnings and ends of steps that there were a while
        ago; nothing is committed unless that is still so, and no step runs.

        Returns: how many there are now; None if nothing is left to commit.
        """
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while self.num_committed < self._end and seen_events == self._num_events and seen_events % 2 == 0:
            num_bytes = min(HUGE_PAGE_BYTES, self._end - self.num_committed)
            # Not mmap.madvise: it would keep the interpreter's lock meanwhile.
            if madvise(self._memory.ctypes.data + self.num_committed, num_bytes, _POPULATE_WRITE):
                self.num_committed = len(self._memory)  # this system cannot
            else:
                self.num_committed += num_bytes
        return self._num_events if self.num_committed < self._end else None

    def _start(self) -> None:
        if self.num_committed < self._end and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=_work, args=(weakref.ref(self),), name="quire-commit", daemon=True)
            self._thread.start()


def _work(reference: "weakref.ref[CommitAhead]") -> None:
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
    num_events: int | None = 0
    while num_events is not None:
        time.sleep(PAUSE_S)
        owner = reference()
        if owner is None:
            return
        num_events = owner.commit_rest(num_events)
        del owner  # it and its memory live no longer than others want them
