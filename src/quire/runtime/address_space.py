"""What a process may still take of the address space it was limited to: `ulimit -v`, `ulimit -d`. Imports no torch.

Such a limit counts what is reserved, not what is used: libraries, the stacks of threads, the KV pool before any of it
is written. Next to read: `hardware.py`, which counts it among the limits of memory.
"""

import errno
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.byte_sizes import format_bytes
from quire.errors import MemoryCapacityError

LIMITS = {
    resource.RLIMIT_AS: ("RLIMIT_AS, ulimit -v", "VmSize"),
    resource.RLIMIT_DATA: ("RLIMIT_DATA, ulimit -d", "VmData"),
}
IMPORT_BYTES = {resource.RLIMIT_AS: 720 << 20, resource.RLIMIT_DATA: 240 << 20}
"""What this process takes once torch is imported; measured with torch 2.9 for CPUs: 640 and 221 MiB."""
THREAD_BYTES = 16 << 20
"""A stack, and what malloc puts beside it."""
NUM_OTHER_THREADS = 4
"""That do not compute: receiving, loading."""


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """One limit: its name, its bytes, and what of them is taken."""

    name: str
    limit_bytes: int
    used_bytes: int
    import_bytes: int

    def left_bytes(self, num_threads: int) -> int:
        """What is left for data, once so many threads that compute have their stacks."""
        return max(0, self.limit_bytes - self.used_bytes - (num_threads + NUM_OTHER_THREADS) * THREAD_BYTES)


def address_spaces(
    limits: Mapping[int, int] | None = None, status: Path = Path("/proc/self/status")
) -> list[AddressSpace]:
    """The limits that are set. `limits`: soft limits in bytes by their numbers, if not this process's own."""
    if limits is None:
        limits = {number: resource.getrlimit(number)[0] for number in LIMITS}
    used = _sizes(status)
    return [
        AddressSpace(name, limits[number], used.get(field, 0), IMPORT_BYTES[number])
        for number, (name, field) in LIMITS.items()
        if limits.get(number, resource.RLIM_INFINITY) != resource.RLIM_INFINITY
    ]


def check_room_for_imports(spaces: list[AddressSpace] | None = None) -> None:
    """Refuse where not even torch can be imported, which would end without a word. Raises: MemoryCapacityError."""
    for space in address_spaces() if spaces is None else spaces:
        if space.limit_bytes < space.import_bytes:
            raise MemoryCapacityError(
                f"loading a model needs {format_bytes(space.import_bytes)} of address space before its first weight,"
                f" but {format_bytes(space.limit_bytes)} are allowed ({space.name}): raise that limit"
            )


@contextmanager
def memory_errors_named(what: str) -> Iterator[None]:
    """What runs out of memory inside says so in one line, whoever asked for it. Raises: MemoryCapacityError."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        said = str(error).strip().splitlines()[-1:] or ["no memory"]
        # torch has no class for it.
        is_memory = isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM
        if not is_memory and not any(words in str(error) for words in ("allocate memory", "start new thread")):
            raise
        limits = "".join(
            f", {format_bytes(space.limit_bytes)} are allowed ({space.name})" for space in address_spaces()
        )
        raise MemoryCapacityError(
            f"{what} ran out of memory{limits}: {said[0]};"
            " a smaller --kv-cache-memory-bytes or --max-num-seqs needs less"
        ) from error


def _sizes(status: Path) -> dict[str, int]:
    """Bytes by field of /proc/self/status; empty where there is none."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in fields if len(words) == 3 and words[2] == "kB"}
