"""Contiguous and buddy allocation behind `BlockManager`'s interface: a sequence owns one run of consecutive blocks.

An allocator chooses the length and the place of a run; `RunBlocks` takes it, and moves it when it must grow. The pool
comes to an allocator as a byte per block, 1 if it is free.
Next to read: `kv.py`.
"""

from operator import not_

from quire.config import SchedulerConfig
from quire.errors import ConfigError, MemoryCapacityError
from quire.events import EventKind, EventLog
from quire.scheduler.blocks import BlockManager
from quire.scheduler.prefix_lookup import PrefixHit
from quire.scheduler.request import Request
from quire.transfers import Tier, Transfer


class Contiguous:
    """Reserves the longest possible sequence for each request; first fit."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks

    def run_len(self, num_needed: int) -> int:
        """Return the blocks to reserve for a sequence that needs `num_needed`."""
        return self._max_blocks

    def find(self, free: bytes, length: int) -> int | None:
        """Return the index of the first block of a free run of `length` blocks, if there is one."""
        at = free.find(b"\1" * length)
        return None if at < 0 else at


class Buddy:
    """Reserves powers of two at multiples of their length, which split in two buddies and merge again.

    Of the free runs it takes the one whose surrounding free run is smallest, as a buddy system's free lists do.
    """

    def run_len(self, num_needed: int) -> int:
        """See `Contiguous`."""
        return 1 << (num_needed - 1).bit_length()

    def find(self, free: bytes, length: int) -> int | None:
        """See `Contiguous`."""
        wanted = b"\1" * length
        starts = [at for at in range(0, len(free) - length + 1, length) if free[at : at + length] == wanted]
        return min(starts, key=lambda at: self._surrounding(free, at, length), default=None)

    def _surrounding(self, free: bytes, at: int, length: int) -> int:
        """Length of the largest free run of a buddy system that contains this one."""
        while True:
            doubled = 2 * length
            start = at - at % doubled
            if start + doubled > len(free) or free[start : start + doubled] != b"\1" * doubled:
                return length
            length = doubled


RunAllocator = Contiguous | Buddy


class RunBlocks(BlockManager):
    """A `BlockManager` whose sequences own one run of consecutive blocks each.

    A table holds all reserved blocks. A run that must grow takes the free blocks behind it, or moves: the step copies
    it. Without prefix caching, forks and windows. Attributes: `num_moves`: runs that moved; `num_split`: times that a
    request found no run although enough blocks were free.
    """

    def __init__(self, config: SchedulerConfig, events: EventLog | None, allocator: RunAllocator) -> None:
        super().__init__(config, events)
        spec = config.kv_cache_groups[0].spec
        if len(config.kv_cache_groups) > 1 or spec.window is not None or spec.is_state or config.enable_prefix_caching:
            raise ConfigError("consecutive blocks need a model whose layers all keep every token, and no prefix cache")
        self.num_moves = self.num_split = 0
        self._spec, self._allocator = spec, allocator

    def check_fits(self, request: Request, num_tokens: int) -> None:
        """Raise MemoryCapacityError if the pool has fewer blocks than are reserved for `num_tokens`."""
        needed = self._run_len(num_tokens)
        if needed > self.pool.num_usable:
            raise MemoryCapacityError(
                f"request '{request.request_id}' reserves {needed} consecutive KV blocks, the cache has "
                f"{self.pool.num_usable}"
            )

    def num_missing(self, request: Request) -> int:
        """Blocks that the known tokens of an admitted request lack: none, they were reserved."""
        return 0

    def fits(self, request: Request, hit: PrefixHit, num_reserved: int) -> bool:
        """Return True if there is a run for all known tokens."""
        length = self._run_len(request.num_tokens)
        fits = self._allocator.find(self._free_map(), length) is not None
        self.num_split += not fits and length <= self.pool.num_free
        return fits

    def allocate(self, request: Request, num_tokens: int, num_drafts: int = 0) -> tuple[Transfer, ...] | None:
        """Make room for the next `num_tokens` tokens in one run; None, and nothing taken, if there is no such run."""
        owned = request.blocks
        table = owned.tables[0]
        num_known = max(request.num_tokens, request.num_computed_tokens + num_tokens)
        length = self._run_len(num_known)
        if self._spec.table_len(num_known, self._block_size) <= len(table):
            return ()
        free = self._free_map()
        if table and (table[0] - 1) % length == 0:
            behind = range(table[-1] + 1, table[0] + length)
            if free[table[-1] : table[-1] + len(behind)] == b"\1" * len(behind):
                self._extend(request, table, behind)
                return ()
        found = self._allocator.find(free, length)
        if found is None:
            self.num_split += length <= self.pool.num_free
            return None
        old_ids = tuple(table)
        table.clear()
        owned.changed_from[0] = 0
        self._extend(request, table, range(found + 1, found + length + 1))
        if not old_ids:
            return ()
        self.num_moves += 1
        for block_id in old_ids:
            self._release(block_id)
        return (Transfer(0, Tier.DEVICE, old_ids, Tier.DEVICE, tuple(table[: len(old_ids)])),)

    def _free_map(self) -> bytes:
        """Return a byte per usable block, 1 if it is free. Index i is block i + 1."""
        return bytes(map(not_, self.pool.reference_counts[1:]))

    def _run_len(self, num_tokens: int) -> int:
        return self._allocator.run_len(self._spec.table_len(num_tokens, self._block_size))

    def _extend(self, request: Request, table: list[int], block_ids: range) -> None:
        """Take free blocks for a table. Mutates: table."""
        owned = request.blocks
        for block_id in block_ids:
            self.pool.share(block_id)
        table.extend(block_ids)
        owned.is_changed = True
        self._events.record(EventKind.ALLOCATE, request.request_id, block_ids=tuple(block_ids))
