"""Calls of the operating system that only Linux has: a port of Quire's Python to another system begins here.

Its files in /proc and /sys are read in `runtime/hardware.py`. The C++ has them in `native/threads/system.h`.
"""

import ctypes
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_WAIT_WRITE_WAIT = 1 | 2 | 4
"""Flags of `sync_file_range`: wait for earlier writes of dirty pages, write others, wait for them."""
_MAP_FIXED = 16
_PUNCH_HOLE = 1 | 2
"""Flags of `fallocate`: free blocks, keep the file's size."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 1 << 20


def allowed_cpus() -> set[int]:
    """Return the CPUs that the calling thread may use."""
    return os.sched_getaffinity(0)


def keep_to_cpus(cpus: Iterable[int]) -> None:
    """Keep the calling thread, and threads that it starts from now on, to these CPUs."""
    os.sched_setaffinity(0, cpus)


def lower_priority(niceness: int) -> None:
    """Give other threads priority over the calling one; elsewhere threads have no priority of their own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def yield_to_others() -> None:
    """Let the calling thread run only where no other thread wants a processor.

    A thread of positive niceness keeps its processor for milliseconds when another one wakes up there, which threads of
    kernels do hundreds of times in a step.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def end_with_parent() -> None:
    """Let the kernel kill this process as soon as its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    with open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[1]) * mmap.PAGESIZE


def return_large_blocks() -> None:
    """Make the C library return each block of 1 MiB or more to the system as soon as it is freed.

    By itself it keeps them, as soon as the first one was freed, and 8 MiB more in the heap of each thread.
    """
    library = ctypes.CDLL(None)
    library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    library.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def return_free_memory() -> None:
    """Return the free pages between used blocks of the C library's heaps: 40 ms for 150 MiB."""
    ctypes.CDLL(None).malloc_trim(0)


def memory_file(name: str) -> int:
    """Return the descriptor of a new empty file in memory; child processes that inherit it share the file."""
    return os.memfd_create(name)


def path_of_descriptor(descriptor: int) -> str:
    """Return a path at which other processes open the file of a descriptor of this one, while it is open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Advise huge pages for a mapping. Kernels without them refuse; memory on small pages is only slower."""
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def bytes_on_huge_pages(start: int) -> int:
    """Return the bytes that lie on huge pages by now, of the mapping of a file that begins at this address."""
    with open("/proc/self/smaps", encoding="utf-8") as mappings:
        for line in mappings:
            if line.startswith(f"{start:x}-"):
                huge = next((line for line in mappings if line.startswith("FilePmdMapped:")), "0 0 kB")
                return int(huge.split()[1]) << 10
    return 0


def reserve_blocks(descriptor: int, offset: int, num_bytes: int) -> None:
    """Reserve disk space for part of a file. Raises: OSError if the disk is full."""
    os.posix_fallocate(descriptor, offset, num_bytes)


def free_blocks(descriptor: int, offset: int, num_bytes: int) -> bool:
    """Give the disk space of part of a file back, which reads as zeros then. Returns: whether the file system can."""
    function = ctypes.CDLL(None).fallocate
    return bool(function(descriptor, _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)) == 0)


def write_back(descriptor: int, offset: int, num_bytes: int) -> None:
    """Write a file's dirty pages to disk and wait for them, where the C library can."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), ctypes.c_uint(_WAIT_WRITE_WAIT))


def map_over(address: int, descriptor: int, offset: int, num_bytes: int) -> None:
    """Map bytes of a file, to be read only, at the address of other memory, which others may read meanwhile.

    The address and the offset are multiples of the page size. Raises: OSError.
    """
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    flags = mmap.MAP_SHARED | _MAP_FIXED
    sizes = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
    if function(*sizes, mmap.PROT_READ, flags, descriptor, ctypes.c_int64(offset)) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
