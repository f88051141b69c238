"""`BlockManager`: which KV blocks each sequence owns, in block numbers only. The memory is `runtime/cache_engine.py`.

Every sequence has one block table per KV cache group; all groups draw from one pool. Blocks are shared by reference
count: by a prefix hit, or by a fork. A shared block is never written: the first writer of a shared, partly filled block
gets a copy. Sliding-window groups give blocks back as the window leaves them behind.
Knows neither queues nor budgets. Next to read: `integrity.py`, which adds everything up, and `scheduler.py`.
"""

from dataclasses import dataclass, field

from quire.cache_spec import PoolShape
from quire.config import SchedulerConfig
from quire.errors import EngineError
from quire.events import EventKind, EventLog
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.prefix_cache import PrefixCache, PrefixChain
from quire.types import NULL_BLOCK_ID, BlockCopy, BlockTableUpdate, Request


@dataclass(slots=True)
class OwnedBlocks:
    """One sequence's block tables. Per group: the table, and how much of it the executor has not yet seen."""

    tables: list[list[int]]
    changed_from: list[int]
    """Entries from here on are unknown to the executor; the table's length if it knows all."""
    num_left_behind: list[int]
    """Leading entries that a sliding window has left: all are the null block."""
    num_registered: int = 0
    """Leading blocks already offered to the prefix cache."""
    is_changed: bool = False
    unchanged_updates: tuple[BlockTableUpdate, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest usable cached prefix: whole blocks, agreed on by all groups, never the whole sequence."""

    num_blocks: int = 0
    num_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    """Per group `num_blocks` entries; a window group has null blocks where no coming token looks."""


class BlockManager:
    """Allocates, shares, copies and frees blocks for sequences named by request id."""

    def __init__(self, config: SchedulerConfig, events: EventLog | None = None) -> None:
        self._block_size = config.block_size
        self._shape = PoolShape(config.kv_cache_groups, config.block_size, config.max_num_batched_tokens)
        self._max_model_len = config.max_model_len
        self._caches_prefixes = config.enable_prefix_caching
        self._windows = [group.spec.window for group in config.kv_cache_groups]
        self._has_windows = any(window is not None for window in self._windows)
        self._events = events
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache()
        self.owned: dict[str, OwnedBlocks] = {}
        self._chains: dict[str, PrefixChain] = {}

    # --- How much is needed ---------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached prefixes included."""
        return self.pool.num_free

    def count_cached(self) -> int:
        """Free blocks that still hold a prefix. Looks at each: for reports now and then."""
        return sum(map(self.cache.holds, self.pool.free_ids()))

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks one unshared sequence holds at once while computing `num_tokens`, over all groups."""
        return self._shape.peak_blocks(num_tokens)

    def longest_sequence(self) -> int:
        """The most tokens a sequence can compute when it has the pool to itself; at most `max_model_len`."""
        return self._shape.longest_sequence(self.pool.num_usable, self._max_model_len)

    def num_missing(self, request: Request) -> int:
        """Blocks the request will still take, at most, until all its known tokens are computed."""
        owned = self.owned[request.request_id]
        return sum(
            self._missing(window, request.num_tokens, len(table), left_behind)
            for window, table, left_behind in zip(self._windows, owned.tables, owned.num_left_behind, strict=True)
        )

    def fits(self, request: Request, hit: PrefixHit, num_reserved: int) -> bool:
        """Whether all known tokens of a request without blocks fit now, beside `num_reserved` blocks promised away."""
        needed = 0
        for window, table in zip(self._windows, hit.tables, strict=True):
            needed += self._missing(window, request.num_tokens, len(table), table.count(NULL_BLOCK_ID))
            needed += sum(block_id != NULL_BLOCK_ID and self.pool.is_free(block_id) for block_id in table)
        return needed <= self.pool.num_free - num_reserved

    def _missing(self, window: int | None, num_tokens: int, table_len: int, left_behind: int) -> int:
        missing = self._shape.table_len(num_tokens) - table_len
        if window is None:
            return missing
        return max(0, min(missing, self._shape.window_peak(window) - (table_len - left_behind)))

    # --- Prefix cache ---------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> PrefixHit:
        """Look up the request's known tokens; at least one token is left to compute. Takes nothing."""
        if not (self._caches_prefixes and request.reads_prefix_cache):
            return PrefixHit(tables=[[] for _ in self._windows])
        chain = self._chain(request)
        limit = (request.num_tokens - 1) // self._block_size
        chain.extend(request, limit, self._block_size)
        found: list[list[int | None]] = []
        for index, window in enumerate(self._windows):
            row: list[int | None] = []
            for digest, content in zip(chain.digests[:limit], chain.contents, strict=False):
                block_id = self.cache.find(index, digest, content)
                if block_id is None and window is None:
                    break
                row.append(block_id)
            found.append(row)
            limit = min(limit, len(row))
        num_blocks = self._agree(found, limit)
        tables = [
            [NULL_BLOCK_ID] * first + [block_id or NULL_BLOCK_ID for block_id in row[first:num_blocks]]
            for first, row in zip(self._first_needed(num_blocks * self._block_size), found, strict=True)
        ]
        return PrefixHit(num_blocks, num_blocks * self._block_size, tables)

    def _agree(self, found: list[list[int | None]], limit: int) -> int:
        """The longest prefix whose needed blocks every group has: full groups all of it, windows its end."""
        num_blocks = limit
        while num_blocks:
            firsts = self._first_needed(num_blocks * self._block_size)
            gaps = [
                at
                for first, row in zip(firsts, found, strict=True)
                for at in range(first, num_blocks)
                if row[at] is None
            ]
            if not gaps:
                break
            # Every prefix that reaches beyond a gap and is no longer than this one needs the missing block too.
            num_blocks = min(gaps)
        return num_blocks

    def _first_needed(self, position: int) -> list[int]:
        """Per group: the first block that tokens from `position` on attend to."""
        return [0 if window is None else max(0, position - window + 1) // self._block_size for window in self._windows]

    def _chain(self, request: Request) -> PrefixChain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._chains[request.request_id] = PrefixChain(request.cache_salt)
        return chain

    def register(self, request: Request) -> None:
        """Offer the blocks that are now computed in full to the prefix cache. Call after a step."""
        num_full = request.num_computed_tokens // self._block_size
        owned = self.owned[request.request_id]
        if num_full <= owned.num_registered or not self._caches_prefixes:
            return
        chain = self._chain(request)
        chain.extend(request, num_full, self._block_size)
        for index, table in enumerate(owned.tables):
            for at in range(owned.num_registered, num_full):
                if table[at] != NULL_BLOCK_ID:
                    self.cache.register(index, chain.digests[at], chain.contents[at], table[at])
        owned.num_registered = num_full

    def forget_prefixes(self, request_id: str) -> None:
        """Take all blocks of a request out of the prefix cache: their content is not to be trusted."""
        for table in self.owned[request_id].tables:
            for block_id in table:
                self.cache.forget(block_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while any block is in use."""
        if self.pool.num_free != self.pool.num_usable:
            return False
        self.cache.clear()
        return True

    # --- Giving and taking ----------------------------------------------------------------------

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Start the request's tables with the blocks of a hit."""
        for block_id in _real_blocks(hit.tables):
            self.pool.share(block_id)
        self.owned[request.request_id] = OwnedBlocks(
            tables=hit.tables,
            changed_from=[0] * len(hit.tables),
            num_left_behind=self._first_needed(hit.num_tokens),
            num_registered=hit.num_blocks,
            is_changed=True,
        )
        if hit.num_blocks:
            self._record(EventKind.SHARE, request.request_id, block_ids=_real_blocks(hit.tables))

    def allocate(self, request: Request, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Make room for the next `num_tokens` tokens; None, and nothing taken, if too few blocks are free.

        A shared block in which the first of them falls is replaced by a copy, which must be made before the step.
        """
        owned = self.owned[request.request_id]
        start = request.num_computed_tokens
        if self._has_windows:
            self._leave_behind(owned, start)
        table_len = self._shape.table_len(start + num_tokens)
        written = start // self._block_size if start % self._block_size else None
        num_needed = 0
        for table in owned.tables:
            num_needed += max(0, table_len - len(table))
            if written is not None and self.pool.reference_counts[table[written]] > 1:
                num_needed += 1
        if num_needed == 0:
            return ()
        if num_needed > self.pool.num_free:
            return None
        taken = self._take(num_needed)
        self._record(EventKind.ALLOCATE, request.request_id, block_ids=tuple(taken))
        taken.reverse()
        copies = [] if written is None else self._copy_shared(request.request_id, owned, written, taken)
        for index, table in enumerate(owned.tables):
            if len(table) < table_len:
                owned.changed_from[index] = min(owned.changed_from[index], len(table))
                table.extend(taken.pop() for _ in range(table_len - len(table)))
        owned.is_changed = True
        return tuple(copies)

    def fork(self, parent_id: str, child: Request) -> None:
        """Give the child all of the parent's blocks that hold its computed tokens, the partly filled last one included.

        Blocks that the parent took for rounds which did not happen stay its own.
        """
        parent = self.owned[parent_id]
        num_held = self._shape.table_len(child.num_computed_tokens)
        tables = [table[:num_held] for table in parent.tables]
        for block_id in _real_blocks(tables):
            self.pool.share(block_id)
        self.owned[child.request_id] = OwnedBlocks(
            tables=tables,
            changed_from=[0] * len(tables),
            num_left_behind=parent.num_left_behind.copy(),
            num_registered=parent.num_registered,
            is_changed=True,
        )
        if parent_id in self._chains:
            self._chains[child.request_id] = self._chains[parent_id].copy()
        self._record(EventKind.SHARE, child.request_id, block_ids=_real_blocks(tables))

    def free(self, request_id: str) -> None:
        """Drop all blocks, deepest first, so that the start of a shared prefix is evicted last."""
        owned = self.owned.pop(request_id)
        for at in range(max(map(len, owned.tables)) - 1, -1, -1):
            for table in owned.tables:
                if at < len(table) and table[at] != NULL_BLOCK_ID:
                    self._release(table[at])

    def forget(self, request_id: str) -> None:
        """Drop the blocks, if any, and the hashes of a request that will not come back."""
        if request_id in self.owned:
            self.free(request_id)
        self._chains.pop(request_id, None)

    def take_table_updates(self, request_id: str) -> tuple[BlockTableUpdate, ...]:
        """What changed in the tables since the last call, per group; from then on the executor knows it."""
        owned = self.owned[request_id]
        if not owned.is_changed:
            return owned.unchanged_updates
        updates = tuple(
            BlockTableUpdate(start, tuple(table[start:]))
            for start, table in zip(owned.changed_from, owned.tables, strict=True)
        )
        owned.changed_from = [len(table) for table in owned.tables]
        owned.unchanged_updates = tuple(BlockTableUpdate(len(table), ()) for table in owned.tables)
        owned.is_changed = False
        return updates

    def _copy_shared(self, request_id: str, owned: OwnedBlocks, written: int, taken: list[int]) -> list[BlockCopy]:
        copies = []
        for index, table in enumerate(owned.tables):
            source_id = table[written]
            if self.pool.reference_counts[source_id] > 1:
                target_id = taken.pop()
                copies.append(BlockCopy(index, source_id, target_id))
                table[written] = target_id
                owned.changed_from[index] = min(owned.changed_from[index], written)
                self._release(source_id)
                self._record(EventKind.COPY, request_id, source_id=source_id, target_id=target_id)
        return copies

    def _leave_behind(self, owned: OwnedBlocks, position: int) -> None:
        for index, first in enumerate(self._first_needed(position)):
            table, done = owned.tables[index], owned.num_left_behind[index]
            if first <= done:
                continue
            for at in range(first - 1, done - 1, -1):
                self._release(table[at])
                table[at] = NULL_BLOCK_ID
            owned.num_left_behind[index] = first
            owned.changed_from[index] = min(owned.changed_from[index], done)
            owned.is_changed = True

    def _take(self, count: int) -> list[int]:
        block_ids = self.pool.take(count)
        evicted = tuple(block_id for block_id in block_ids if self.cache.forget(block_id))
        if evicted:
            self._record(EventKind.EVICT, "", block_ids=evicted)
        return block_ids

    def _release(self, block_id: int) -> None:
        if block_id == NULL_BLOCK_ID:
            raise EngineError("the null block was released")
        self.pool.release(block_id, holds_prefix=self.cache.holds(block_id))

    def _record(self, kind: EventKind, request_id: str, **data: object) -> None:
        if self._events is not None:
            self._events.record(kind, request_id, **data)


def _real_blocks(tables: list[list[int]]) -> tuple[int, ...]:
    return tuple(block_id for table in tables for block_id in table if block_id != NULL_BLOCK_ID)
