"""`CommitAhead`: the pages of the KV pool that are needed next are committed while a processor has nothing to do.

A page's first write waits until the system has found and cleared it: 0.2 ms for a huge page, and 2 to 5 ms in virtual
machines whose host gives memory out lazily. With 64 streams that was a quarter of a step's time until the whole pool
had been written once. Committing the pool at start would take seconds and memory that few need.
Next to read: `cache_engine.py`.
"""

import ctypes
import os
import threading
import weakref
from contextlib import suppress

import torch

from quire.runtime.huge_pages import HUGE_PAGE_BYTES

AHEAD_BYTES = 64 << 20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14; `mmap` has no name for it."""


class CommitAhead:
    """Keeps some memory behind the highest address in use committed. Contents are not touched.

    A thread that runs only where no other wants the processor (SCHED_IDLE) does the work, and ends when it is done.
    Systems that cannot commit memory in advance do it at the first write, as without this.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """Shapes: memory [num_bytes], from `huge_pages.allocate`. Dtypes: uint8."""
        self._memory = memory
        self._end = 0
        self._num_committed = 0
        self._thread: threading.Thread | None = None

    @property
    def num_committed(self) -> int:
        """Bytes from the start that were committed here. They may have been before."""
        return self._num_committed

    def reach(self, num_bytes: int) -> None:
        """The first `num_bytes` are in use or will be at once."""
        self._end = min(num_bytes + AHEAD_BYTES, len(self._memory))
        # Half of it, so that a thread is started once in a while and not for every page.
        is_short = self._num_committed < min(num_bytes + AHEAD_BYTES // 2, len(self._memory))
        if is_short and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=_commit_all, args=(weakref.ref(self),), name="quire-commit", daemon=True
            )
            self._thread.start()

    def commit_next(self) -> bool:
        """Commit one page; false if there is nothing to do or the system cannot."""
        start = self._num_committed
        if start >= self._end:
            return False
        num_bytes = min(HUGE_PAGE_BYTES, self._end - start)
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # Not mmap.madvise: it would keep the interpreter's lock meanwhile.
        is_done: bool = madvise(self._memory.data_ptr() + start, num_bytes, _POPULATE_WRITE) == 0
        self._num_committed = start + num_bytes if is_done else len(self._memory)
        return is_done


def _commit_all(reference: "weakref.ref[CommitAhead]") -> None:
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
    while _commit_next_of(reference):
        pass


def _commit_next_of(reference: "weakref.ref[CommitAhead]") -> bool:
    # The memory lives no longer than its owner but for one page's time.
    owner = reference()
    return owner is not None and owner.commit_next()
