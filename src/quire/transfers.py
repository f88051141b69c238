"""Moves of KV blocks between tiers: device memory, host memory and disk. Integers and digests only.

The scheduler decides (`scheduler/tiers.py`), `runtime/cache_engine.py` moves, and reports what arrived with the result
of a step. Next to read: `types.py`.
"""

import enum
from dataclasses import dataclass


class Tier(enum.Enum):
    """Memory that holds KV blocks."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies blocks, in all layers of a group, before the step computes. The step reads all sources in memory before it
    writes a target. Copy-on-write is a transfer from device to device.

    Blocks on disk have no numbers: their ids are empty, and `digests` has the prefix of each block. A transfer from
    another tier to the device may last longer than its step: a `TransferReport` names its targets when they are filled.
    """

    group_index: int
    source_tier: Tier
    source_ids: tuple[int, ...]
    target_tier: Tier
    target_ids: tuple[int, ...]
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Transfers that ended since the last report.

    Fields:
        filled: device blocks that now hold what was in another tier; failed: those that do not, because it was gone
            or damaged.
        num_bytes_read, num_bytes_written: of the disk.
        host_bytes_per_s: measured speed of copies from host memory to the device; 0 if none was made.
    """

    filled: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    num_bytes_read: int = 0
    num_bytes_written: int = 0
    host_bytes_per_s: float = 0.0
