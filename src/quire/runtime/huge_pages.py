"""`allocate`: memory for weights and KV pool, on huge pages where the system allows them; `map_file`: a file as memory.

`on_huge_pages` copies what the file system keeps on small ones; `trim` makes memory smaller.
Next to read: `cache_engine.py` (KV pool) and `plan/weight_file.py` (weights).
"""

import ctypes
import errno
import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from quire._native import explain_bus_errors
from quire.byte_sizes import format_bytes
from quire.errors import MemoryCapacityError
from quire.linux import bytes_on_huge_pages, prefer_huge_pages

HUGE_PAGE_BYTES = 2 << 20
COPIED_BYTES = 512 << 20
"""Largest mapping that is copied onto huge pages: this takes about 0.1 s.

Small pages cost small models most: 16 % of the tokens per second of 94 MB of weights with rows of 576, 3 % with 1.1 GB
and rows of 2,048 (Zen 3, one stream).
"""
ENOUGH_HUGE_PAGES = 0.9


def allocate(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros, committed where they are first touched; from one huge page on, aligned to huge pages.

    On pages of 4 KiB, attention to 2,048 tokens of 8 requests took 7 % longer (Zen 5, a virtual machine): each block
    of the pool is some hundred pages, far from its request's next one.
    Shapes: [num_bytes]. Dtypes: uint8. Raises: MemoryCapacityError.
    """
    spare = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
    try:
        memory = mmap.mmap(-1, max(num_bytes + spare, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryCapacityError(
            f"the system refuses {format_bytes(num_bytes)} of memory for weights or KV cache: {error};"
            " a smaller --kv-cache-memory-bytes needs less"
        ) from error
    prefer_huge_pages(memory)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES if spare else 0
    return whole[start : start + num_bytes]


def map_file(descriptor: int, num_bytes: int, offset: int, *, is_writable: bool = False) -> NDArray[np.uint8]:
    """Return bytes of a file, which all processes that map it share; on huge pages where its file system has them.

    `offset`: a multiple of `HUGE_PAGE_BYTES`, as huge pages of files are aligned in the file and in memory.
    Shapes: [num_bytes]. Dtypes: uint8. Raises: OSError.
    """
    explain_bus_errors()
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    try:
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=prot, offset=offset)
    except ValueError as error:  # the file is shorter
        raise OSError(errno.EINVAL, str(error)) from error
    prefer_huge_pages(memory)
    return np.frombuffer(memory, np.uint8)


def on_huge_pages(mapped: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a mapping of a file as it is, or its copy, if small pages would make it slow and it is small itself.

    The page cache has huge pages on ext4 from Linux 6.16 on, on XFS and Btrfs, and where it found free ones.
    Shapes: [num_bytes]. Raises: MemoryCapacityError.
    """
    if not HUGE_PAGE_BYTES <= len(mapped) <= COPIED_BYTES:
        return mapped
    mapped[:: mmap.PAGESIZE].max()  # pages are mapped when they are touched
    if bytes_on_huge_pages(mapped.ctypes.data) >= ENOUGH_HUGE_PAGES * len(mapped):
        return mapped
    memory = allocate(len(mapped))
    np.copyto(memory, mapped)
    return memory


def trim() -> None:
    """Return what the C library holds of freed memory to the system, where the library can (glibc)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
