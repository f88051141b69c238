"""Memory of a comparison: a share of what is available. What would take more is refused, with the number that fits.

The share is a limit of the process, which engines see as that of their machine, and which holds what no plan counts.
Next to read: `rig.py`.
"""

import contextlib
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from quire.byte_sizes import format_bytes
from quire.errors import MemoryCapacityError
from quire.runtime.hardware import ADDRESS_SPACE_LIMITS, detect_hardware, has_gpu_driver
from quire_lessons.compare.results import TimedRequest

SHARE = 0.75
LIMIT = f"{SHARE:.0%} of the memory that is available"
PROMPT_TOKEN_BYTES = 64
"""Integers of Python in a prompt and in the engine's copy of it; measured: 40 to 60."""
OUTPUT_TOKEN_BYTES = 3 * 200
"""Entries in the records of three modes, which have one per request and step; measured: 190 each."""


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process take `SHARE` of the available memory at most.

    Not where there is the driver of a GPU, which reserves addresses that it does not use.
    Raises: MemoryCapacityError in place of MemoryError.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    share_bytes = int(SHARE * detect_hardware("cpu").available_memory_bytes)
    most = psutil.Process().memory_info().data + share_bytes
    try:
        if not has_gpu_driver():
            hard = before[1]
            resource.setrlimit(
                resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
            )
        yield
    except MemoryError:
        needs = f"the comparison needs more than {format_bytes(share_bytes)}, {LIMIT}"
        raise MemoryCapacityError(f"{needs}: fewer requests, or a shorter context, may fit") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@dataclass(frozen=True, slots=True)
class Size:
    """A setting that decides how much memory an engine needs, and the engine's options for each value of it."""

    name: str
    value: int
    options: Callable[[int], Mapping[str, Any]]

    def refusal(self, error: MemoryCapacityError, decide: Callable[[Mapping[str, Any]], object]) -> MemoryCapacityError:
        """Return an engine's refusal with the value that fits. `decide` raises MemoryCapacityError for options that
        do not fit."""
        low, high = 0, self.value
        while high - low > 1:
            middle = (low + high) // 2
            try:
                decide(self.options(middle))
                low = middle
            except MemoryCapacityError:
                high = middle
        message = error.message.replace(ADDRESS_SPACE_LIMITS[resource.RLIMIT_DATA][0], LIMIT)
        if low:
            message = f"{message.rpartition(': ')[0]}: {self.name}={low} fits"
        return MemoryCapacityError(message)


def checked(jobs: Iterable[TimedRequest]) -> list[TimedRequest]:
    """Return requests as they are drawn.

    Raises: MemoryCapacityError once they, and the records of their steps, need more than is available.
    """
    found: list[TimedRequest] = []
    available, num_bytes = detect_hardware("cpu").available_memory_bytes, 0
    for job in jobs:
        num_bytes += PROMPT_TOKEN_BYTES * len(job.prompt) + OUTPUT_TOKEN_BYTES * job.num_tokens
        if num_bytes > available:
            raise MemoryCapacityError(
                f"requests of up to {max(len(job.prompt) + job.num_tokens for job in [job, *found])} tokens, and the "
                f"records of their steps, need more than {format_bytes(available)}, {LIMIT}: requests={len(found)} fits"
            )
        found.append(job)
    return found
