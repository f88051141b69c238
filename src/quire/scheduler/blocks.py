"""`BlockManager`: cache blocks of each sequence, in block numbers only. The memory is in `runtime/cache_engine.py`.

Every sequence has one block table per cache group; all groups draw pages from one pool. Blocks are shared by reference
count, after a prefix hit or a fork. No step writes a shared block: the first writer of a shared, partly filled block
gets a copy. Sliding-window groups give blocks back as the window moves past them.

The table of a state group has one entry, which every step rewrites. So a step that starts from a state which others
need continues in a copy: after a fork, after a prefix hit, at a checkpoint, and before drafts, which may be rejected.
Knows neither queues nor budgets. Next to read: `scheduler.py`; `prefix_lookup.py` and `tiers.py` for its parts.
"""

from collections.abc import Iterable
from functools import partial

from quire.cache_spec import PoolShape
from quire.config import SchedulerConfig
from quire.errors import MemoryCapacityError
from quire.events import EventKind, EventLog
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.prefix_cache import Key, PrefixCache
from quire.scheduler.prefix_lookup import Checkpoints, PrefixHit, PrefixLookup
from quire.scheduler.request import KeptState, OwnedBlocks, Request
from quire.scheduler.tiers import BlockTiers
from quire.transfers import Tier, Transfer
from quire.types import NULL_BLOCK_ID


class BlockManager:
    """Allocates, shares, copies and frees the blocks that requests own."""

    def __init__(
        self,
        config: SchedulerConfig,
        events: EventLog | None = None,
        pool: BlockPool | None = None,
        stored: Iterable[Key] = (),
    ) -> None:
        """`pool`: made by the caller, to choose blocks by another rule. `stored`: blocks that are on disk."""
        self._config, self._block_size = config, config.block_size
        self.shape = PoolShape(config.kv_cache_groups, config.block_size, config.max_num_batched_tokens)
        self._specs = [group.spec for group in config.kv_cache_groups]
        self.state_groups = [index for index, spec in enumerate(self._specs) if spec.is_state]
        self.token_groups = [index for index, spec in enumerate(self._specs) if not spec.is_state]
        self._window_groups = [index for index, spec in enumerate(self._specs) if spec.window is not None]
        self._events = EventLog(0) if events is None else events
        self.pool = BlockPool(config.num_blocks) if pool is None else pool
        self.cache = PrefixCache()
        self.checkpoints = Checkpoints(config, self.cache)
        self.lookup = PrefixLookup(config, self.cache)
        self.tiers = BlockTiers(config, self.pool, self.cache, self.lookup, self._events, stored)

    # --- How much is needed ---------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached prefixes included."""
        return self.pool.num_free

    def check_fits(self, request: Request, num_tokens: int) -> None:
        """Raise MemoryCapacityError if a sequence of `num_tokens` needs more blocks than there are.

        Siblings are not added up: they may run one after another. The last token generated is never computed.
        """
        num_uncomputed = 0 if request.sampling is None else 1
        num_needed, num_usable = self.shape.peak_blocks(num_tokens - num_uncomputed), self.pool.num_usable
        if num_needed <= num_usable:
            return
        longest = self.shape.longest_sequence(num_usable, self._config.max_model_len)
        prompt_len = request.num_prompt_tokens
        num_fitting = longest + num_uncomputed - prompt_len
        advice = f"max_tokens={num_fitting} fits" if num_fitting > 0 else f"a prompt of {longest} tokens fits"
        raise MemoryCapacityError(
            f"request '{request.request_id}' needs {num_needed} KV blocks of {self._block_size} tokens for "
            f"{prompt_len} prompt + {num_tokens - prompt_len} generated tokens, the cache has {num_usable}, "
            f"{num_needed - num_usable} too few; {advice}, or give the cache more (kv_cache_memory_bytes)"
        )

    def num_missing(self, request: Request) -> int:
        """Most blocks that the request will still take until all its known tokens are computed."""
        owned = request.blocks
        return sum(
            self._missing(index, request.num_tokens, len(table), left_behind)
            for index, (table, left_behind) in enumerate(zip(owned.tables, owned.num_left_behind, strict=True))
        )

    def fits(self, request: Request, hit: PrefixHit, num_reserved: int) -> bool:
        """Return True if all known tokens of a request without blocks fit now, beside `num_reserved` blocks."""
        needed = len(self.state_groups) if hit.num_tokens else 0  # checkpoints are copied
        for index, table in enumerate(hit.tables):
            needed += self._missing(index, request.num_tokens, len(table), table.count(NULL_BLOCK_ID))
            needed += sum(block_id != NULL_BLOCK_ID and not self.pool.reference_counts[block_id] for block_id in table)
        return needed <= self.pool.num_free - num_reserved

    def _missing(self, group_index: int, num_tokens: int, table_len: int, left_behind: int) -> int:
        spec, size = self._specs[group_index], self._block_size
        missing = spec.table_len(num_tokens, size) - table_len
        if spec.window is None:
            return missing
        peak = spec.peak_blocks(num_tokens, size, self.shape.max_num_batched_tokens)
        return max(0, min(missing, peak - (table_len - left_behind)))

    # --- Prefix cache ---------------------------------------------------------------------------

    def awaits_tiers(self, request: Request, hit: PrefixHit, num_reserved: int) -> bool:
        """Return True if blocks behind the hit are on the way to the device, from now on if they fit.

        As many blocks must be free as for admission, beside `num_reserved` ones.
        """
        has_room = partial(self.fits, request, hit, num_reserved + len(self.state_groups))
        return self.tiers.awaits(request, hit, has_room, self._take)

    def register(self, request: Request, num_tokens: int) -> None:
        """Offer the blocks and checkpoints of the first `num_tokens` tokens, which steps have computed, to the prefix
        cache. Steps in flight compute further ones."""
        num_full = num_tokens // self._block_size
        owned = request.blocks
        while owned.kept_states and owned.kept_states[0].position < num_tokens:
            kept = owned.kept_states.pop(0)
            for block_id in self.checkpoints.register(request, kept):
                self._events.record(EventKind.CACHE, request.request_id, block_ids=(block_id,))
            for block_id in kept.block_ids.values():
                self._release(block_id)
        if num_full <= owned.num_registered or not self._config.enable_prefix_caching:
            return
        chain = request.hashes(num_full, self._block_size)
        cached = [
            block_id
            for index in self.token_groups
            for at in range(owned.num_registered, num_full)
            if (block_id := owned.tables[index][at]) != NULL_BLOCK_ID
            and self.cache.register(index, chain.digests[at], chain.contents[at], block_id)
        ]
        if cached:
            self._events.record(EventKind.CACHE, request.request_id, block_ids=tuple(cached))
        owned.num_registered = num_full

    def forget_prefixes(self, request: Request) -> None:
        """Take all blocks of a request out of the prefix cache: their content is not to be trusted."""
        block_ids = list(request.blocks.block_ids())
        if self.state_groups:
            for digest, content in zip(request.chain.digests, request.chain.contents, strict=True):
                found = (self.cache.find(index, digest, content) for index in self.state_groups)
                block_ids += [checkpoint for checkpoint in found if checkpoint is not None]
        self.tiers.distrust(block_ids)
        self._evict(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while any block is in use."""
        if self.pool.num_free != self.pool.num_usable:
            return False
        self._evict(self.cache.block_ids())
        return True

    # --- Taking blocks --------------------------------------------------------------------------

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Start the request's tables with the blocks of a hit."""
        num_left_behind = [spec.first_needed(hit.num_tokens, self._block_size) for spec in self._specs]
        self._own(request, hit.tables, num_left_behind, hit.num_tokens // self._block_size)
        self.tiers.admit(request)

    def allocate(self, request: Request, num_tokens: int, num_drafts: int = 0) -> tuple[Transfer, ...] | None:
        """Make room for the next `num_tokens` tokens; None, and nothing taken, if too few blocks are free.

        A shared block in which the first of them falls is replaced by a copy, which must be made before the step.
        `num_drafts` of the tokens may be rejected (`truncate`): then the state before the step is kept.
        """
        owned = request.blocks
        start = request.num_computed_tokens
        for index in self._window_groups:
            for block_id in owned.leave_behind(index, self._specs[index].first_needed(start, self._block_size)):
                self._release(block_id)
        table_len = -(-(start + num_tokens) // self._block_size)
        replaced: list[tuple[int, int]] = []
        num_needed = 0
        written = start // self._block_size if start % self._block_size else None
        for index in self.token_groups:
            table = owned.tables[index]
            num_needed += max(0, table_len - len(table))
            if written is not None and self.pool.reference_counts[table[written]] > 1:
                replaced.append((index, written))
        keeps_states = False
        if self.state_groups:
            has_room = num_needed + len(replaced) + len(self.state_groups) <= self.pool.num_free
            keeps_states = num_drafts > 0 or (has_room and self.checkpoints.wants(request))
            for index in self.state_groups:
                if not (table := owned.tables[index]):
                    num_needed += 1
                elif keeps_states or self.pool.reference_counts[table[0]] > 1 or self.cache.holds(table[0]):
                    replaced.append((index, 0))
        num_needed += len(replaced)
        if num_needed == 0:
            return ()
        if num_needed > self.pool.num_free:
            return None
        taken = self._take(num_needed)
        self._events.record(EventKind.ALLOCATE, request.request_id, block_ids=tuple(taken))
        taken.reverse()
        sources = {index: owned.tables[index][at] for index, at in replaced}
        transfers = [self._replace(request, index, at, taken.pop()) for index, at in replaced]
        if keeps_states:
            states = {index: sources.pop(index) for index in self.state_groups if index in sources}
            owned.kept_states.append(KeptState(start, states, start + num_tokens if num_drafts else None))
        for source_id in sources.values():
            self._release(source_id)
        self._fill(owned, table_len, taken)
        return tuple(transfers)

    def fork(self, parent: Request, child: Request) -> None:
        """Give the child all of the parent's blocks that hold its computed tokens, the partly filled last one included.

        The parent keeps to itself the blocks that it took for tokens which were not computed.
        """
        num_held = -(-child.num_computed_tokens // self._block_size)
        tables = [table[:num_held] for table in parent.blocks.tables]
        self._own(child, tables, parent.blocks.num_left_behind.copy(), parent.blocks.num_registered)
        child.chain = parent.chain.copy()

    # --- Giving back ----------------------------------------------------------------------------

    def truncate(self, request: Request, num_tokens: int) -> int:
        """Give back the blocks behind the first `num_tokens` tokens: of rejected drafts, or of steps that ended early.

        A recurrent state that has taken in rejected drafts cannot be taken back. The request then returns to the state
        before the step, and computes the accepted tokens again; so a request with states may only be given drafts
        when a single token is left to compute, or it would not get ahead.

        Returns: how many tokens are computed from now on: `num_tokens`, or fewer if a state was restored.
        """
        owned = request.blocks
        kept = owned.kept_states[-1] if owned.kept_states else None
        if kept is not None and kept.drafts_end is not None and kept.position <= num_tokens < kept.drafts_end:
            owned.kept_states.pop()
            num_tokens = kept.position
            for index, block_id in kept.block_ids.items():
                self._release(owned.replace(index, 0, block_id))
        assert num_tokens >= owned.num_registered * self._block_size, "tokens behind them are cached"
        for index, spec in enumerate(self._specs):
            assert spec.first_needed(num_tokens, self._block_size) >= owned.num_left_behind[index], "a window moved on"
            for block_id in owned.cut(index, spec.table_len(num_tokens, self._block_size)):
                self._release(block_id)
        return num_tokens

    def preempt(self, request: Request) -> None:
        """Drop all blocks of a request that comes back; full ones may be kept in host memory until then."""
        self.tiers.swap_out(request, request.chain.digests[: request.blocks.num_registered])
        self.release(self.detach(request))

    def forget(self, request: Request) -> None:
        """Drop the blocks, if any, of a request that will not come back."""
        self.release(self.detach(request))
        self.tiers.forget(request)

    def detach(self, request: Request) -> OwnedBlocks:
        """Take a request's blocks out without releasing them: a step that writes them is still in flight."""
        owned, request.blocks = request.blocks, OwnedBlocks()
        return owned

    def release(self, owned: OwnedBlocks) -> None:
        """Drop all references of detached blocks."""
        for block_id in owned.block_ids():
            self._release(block_id)

    # --- References -----------------------------------------------------------------------------

    def _own(self, request: Request, tables: list[list[int]], num_left_behind: list[int], num_registered: int) -> None:
        """Start a sequence with blocks that it shares."""
        block_ids = tuple(block_id for table in tables for block_id in table if block_id != NULL_BLOCK_ID)
        for block_id in block_ids:
            self.pool.share(block_id)
        request.blocks = OwnedBlocks(tables, [0] * len(tables), num_left_behind, num_registered, is_changed=True)
        if block_ids:
            self._events.record(EventKind.SHARE, request.request_id, block_ids=block_ids)

    def _replace(self, request: Request, group_index: int, at: int, target_id: int) -> Transfer:
        """Put a new block into a table, with the transfer that fills it; the old one is the caller's to release."""
        source_id = request.blocks.replace(group_index, at, target_id)
        self._events.record(EventKind.COPY, request.request_id, source_id=source_id, target_id=target_id)
        return Transfer(group_index, Tier.DEVICE, (source_id,), Tier.DEVICE, (target_id,))

    def _fill(self, owned: OwnedBlocks, num_entries: int, block_ids: list[int]) -> None:
        """Bring all tables to this length, those of states to one entry. Mutates: block_ids, by its end."""
        for index, table in enumerate(owned.tables):
            length = 1 if self._specs[index].is_state else num_entries
            if len(table) < length:
                owned.note_change(index, len(table))
                table.extend(block_ids.pop() for _ in range(length - len(table)))

    def _take(self, count: int) -> list[int]:
        block_ids = self.pool.take(count)
        self.tiers.leave(block_ids)
        self._evict(block_ids)
        return block_ids

    def _evict(self, block_ids: Iterable[int]) -> None:
        evicted = tuple(block_id for block_id in block_ids if self.cache.forget(block_id))
        for block_id in evicted:
            self.pool.lose_prefix(block_id)
        if evicted:
            self._events.record(EventKind.EVICT, "", block_ids=evicted)

    def _release(self, block_id: int) -> None:
        self.pool.release(block_id, holds_prefix=self.cache.holds(block_id))
