"""`BlockTiers`: cached blocks that have left the device for host memory or disk, and those on the way back.

A cached block whose memory is taken is written to disk, if there is a disk tier and it is not there yet. If it belongs
to a preempted request, it goes to a slot of host memory, until that request runs again or ends. A waiting request whose
prefix goes on in another tier takes device blocks for it, and waits while other requests run; when they are filled,
they are cached blocks like all others, and the request is admitted with them. So a block that cannot be read back costs
time, and nothing else. Knows no I/O and no bytes. Next to read: `blocks.py`; `runtime/cache_engine.py` moves the bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from quire.config import SchedulerConfig
from quire.events import EventKind, EventLog
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.prefix_cache import CacheEntry, Key, PrefixCache
from quire.scheduler.prefix_lookup import PrefixHit, PrefixLookup
from quire.scheduler.request import Fetch, Request
from quire.transfers import Tier, Transfer, TransferReport


class BlockTiers:
    """Blocks outside of the device. `stored`: those on disk as far as is known; a read finds out."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        cache: PrefixCache,
        lookup: PrefixLookup,
        events: EventLog,
        stored: Iterable[Key] = (),
    ) -> None:
        self._config, self._pool, self._cache, self._lookup, self._events = config, pool, cache, lookup, events
        self._uses_disk = config.max_disk_bytes > 0
        self.stored = set(stored)
        self._tokens_per_s = 0.0
        self._host_bytes_per_s = 0.0
        self._block_bytes = sum(group.page_bytes(config.block_size) for group in config.kv_cache_groups)
        self.slots: dict[Key, int] = {}
        self._unsent: set[Key] = set()
        """Keys of slots that a transfer of the next step fills: the same step cannot read them."""
        self._unsent_slots: list[int] = []
        """Slots of such keys that are free again after that step: two transfers must not fill one slot."""
        self.free_slots = list(range(config.num_host_blocks - 1, -1, -1))
        self._num_wanted: Counter[Key] = Counter()
        """Preempted requests that need a block again."""
        self.fetches: list[Fetch] = []
        self._fetch_of: dict[int, Fetch] = {}
        self._transfers: list[Transfer] = []

    # --- Leaving the device ---------------------------------------------------------------------

    def begin_step(self, tokens_per_s: float) -> None:
        """Take note of the speed of prefill, which tells whether blocks are worth copies to the host; 0: unknown."""
        self._tokens_per_s = tokens_per_s

    def leave(self, block_ids: Iterable[int]) -> None:
        """Copy the cached ones of these blocks to other tiers, before the next step overwrites them."""
        if not (self._uses_disk or self._num_wanted):
            return
        moved: dict[tuple[bool, int], list[tuple[int, Any]]] = {}
        """By whether it goes to disk, and by group: each block, with its digest or slot."""
        for block_id in block_ids:
            entry = self._cache.entry(block_id)
            if entry is None:
                continue
            group, key = entry.group_index, entry.key
            if self._uses_disk and key not in self.stored:
                self.stored.add(key)
                moved.setdefault((True, group), []).append((block_id, entry.digest))
            if self._num_wanted[key] and key not in self.slots and self.free_slots and self._host_pays():
                slot = self.slots[key] = self.free_slots.pop()
                self._unsent.add(key)
                moved.setdefault((False, group), []).append((block_id, slot))
        for (to_disk, group), pairs in sorted(moved.items(), key=lambda item: item[0][0]):
            ids, places = zip(*pairs, strict=True)
            target = (Tier.DISK, (), places) if to_disk else (Tier.HOST, places)
            self._transfers.append(Transfer(group, Tier.DEVICE, ids, *target))
            self._events.record(EventKind.OFFLOAD, block_ids=ids, tier=target[0].value)

    def save_all(self) -> tuple[Transfer, ...]:
        """Return transfers of all free cached blocks to disk, for the end. The newest come first, each prefix from its
        start."""
        self._num_wanted.clear()
        self.leave(reversed(self._pool.free_ids()))
        return self.take_transfers()

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers since the last call; the next step makes them."""
        self._unsent.clear()
        self.free_slots += self._unsent_slots
        self._unsent_slots.clear()
        transfers, self._transfers = tuple(self._transfers), []
        return transfers

    def distrust(self, block_ids: Iterable[int]) -> None:
        """Forget copies of these blocks: their content may be damaged."""
        for block_id in block_ids:
            entry = self._cache.entry(block_id)
            if entry is not None:
                self.stored.discard(entry.key)
                self._free_slot(entry.key)

    # --- Preempted requests ---------------------------------------------------------------------

    def swap_out(self, request: Request, digests: Iterable[bytes]) -> None:
        """Keep blocks of a preempted request in host memory from the moment they leave the device."""
        request.has_fetched = False
        if self._config.num_host_blocks:
            groups = range(len(self._config.kv_cache_groups))
            request.swapped_keys = [(group, digest) for digest in digests for group in groups]
            self._num_wanted.update(request.swapped_keys)

    def _forget_swapped(self, request: Request) -> None:
        keys, request.swapped_keys = request.swapped_keys, []
        for key in keys:
            self._num_wanted[key] -= 1
            if self._num_wanted[key] <= 0:
                del self._num_wanted[key]
                self._free_slot(key)

    def _free_slot(self, key: Key) -> None:
        if (slot := self.slots.pop(key, None)) is not None:
            (self._unsent_slots if key in self._unsent else self.free_slots).append(slot)

    def _host_pays(self) -> bool:
        """Return True unless computing a block again is known to be faster than copying it out and back."""
        if not self._config.compares_swap or not (self._tokens_per_s and self._host_bytes_per_s):
            return True
        return 2 * self._block_bytes / self._host_bytes_per_s < self._config.block_size / self._tokens_per_s

    # --- Coming back ----------------------------------------------------------------------------

    @property
    def is_fetching(self) -> bool:
        """True while transfers to the device are under way."""
        return bool(self._fetch_of)

    def held_ids(self) -> list[int]:
        """Return the blocks that fetches hold, one entry per reference."""
        return [block_id for fetch in self.fetches for block_id in fetch.block_ids]

    def awaits(
        self, request: Request, hit: PrefixHit, has_room: Callable[[], bool], take: Callable[[int], list[int]]
    ) -> bool:
        """Return True if the request must wait for blocks behind its hit. Starts to fetch them, if `has_room`."""
        if request.fetch is not None:
            return bool(request.fetch.coming)
        if request.has_fetched or not (self.stored or self.slots):
            return False
        num_tokens, rows = self._lookup.search(request, self._find)
        if num_tokens <= hit.num_tokens or not has_room():
            return False
        found = [block for row in rows for block in row]
        held = [block for block in found if isinstance(block, int)]
        wanted = [block for block in found if isinstance(block, CacheEntry)]
        num_idle = sum(not self._pool.reference_counts[block_id] for block_id in held)
        if len(wanted) + num_idle > self._pool.num_free:  # a window's blocks may be others than those of the hit
            return False
        for block_id in held:
            self._pool.share(block_id)
        # A transfer frees no slot before the step has read it, so blocks that leave now do not take those of `wanted`.
        slots = [None if entry.key in self._unsent else self.slots.get(entry.key) for entry in wanted]
        taken = take(len(wanted))
        request.has_fetched = True
        self._start(Fetch(request, held + taken), list(zip(taken, wanted, slots, strict=True)))
        return True

    def _find(self, group_index: int, digest: bytes, content: bytes) -> int | CacheEntry | None:
        block_id = self._cache.find(group_index, digest, content)
        if block_id is not None:
            return block_id
        key = group_index, digest
        if key in self.stored or (key in self.slots and key not in self._unsent and self._host_pays()):
            return CacheEntry(group_index, digest, content)
        return None

    def _start(self, fetch: Fetch, moves: list[tuple[int, CacheEntry, int | None]]) -> None:
        fetch.request.fetch = fetch
        self.fetches.append(fetch)
        moved: dict[tuple[int, bool], list[tuple[Any, int]]] = {}
        """By group, and by whether it comes from disk: the slot or digest of each block."""
        for block_id, entry, slot in moves:
            fetch.coming[block_id] = (Tier.DISK if slot is None else Tier.HOST, entry)
            self._fetch_of[block_id] = fetch
            place = entry.digest if slot is None else slot
            moved.setdefault((entry.group_index, slot is None), []).append((place, block_id))
        for (group, from_disk), pairs in sorted(moved.items(), key=lambda item: item[0]):
            places, ids = zip(*pairs, strict=True)
            if from_disk:
                self._transfers.append(Transfer(group, Tier.DISK, (), Tier.DEVICE, ids, places))
            else:
                self._transfers.append(Transfer(group, Tier.HOST, places, Tier.DEVICE, ids))
        self._events.record(EventKind.FETCH, fetch.request.request_id, block_ids=tuple(fetch.block_ids))

    def note(self, report: TransferReport | None) -> None:
        """Take up the blocks that transfers have filled or could not fill."""
        if report is None:
            return
        # The fastest: a pause of the machine during one copy must not end all copies.
        self._host_bytes_per_s = max(self._host_bytes_per_s, report.host_bytes_per_s)
        if report.num_bytes_read or report.num_bytes_written:
            self._events.record(
                EventKind.DISK, num_bytes_read=report.num_bytes_read, num_bytes_written=report.num_bytes_written
            )
        ended = [self._end_read(block_id, is_filled=True) for block_id in report.filled]
        ended += [self._end_read(block_id, is_filled=False) for block_id in report.failed]
        for fetch in {id(fetch): fetch for fetch in ended if not fetch.coming}.values():
            size, digests = self._config.block_size, (fetch.disk_digests, fetch.host_digests)
            num_disk_tokens, num_host_tokens = (size * len(found) for found in digests)
            self._events.record(
                EventKind.FETCHED,
                fetch.request.request_id,
                num_disk_tokens=num_disk_tokens,
                num_host_tokens=num_host_tokens,
            )
            if fetch.is_orphan:
                self._give_up(fetch)

    def _end_read(self, block_id: int, *, is_filled: bool) -> Fetch:
        fetch = self._fetch_of.pop(block_id)
        tier, entry = fetch.coming.pop(block_id)
        if not is_filled:
            self.stored.discard(entry.key)
            fetch.block_ids.remove(block_id)
            self._pool.release(block_id, holds_prefix=False)
            self._events.record(EventKind.RELEASE, fetch.request.request_id, block_ids=(block_id,))
            return fetch
        (fetch.disk_digests if tier is Tier.DISK else fetch.host_digests).add(entry.digest)
        if self._cache.register(entry.group_index, entry.digest, entry.content, block_id):
            self._events.record(EventKind.CACHE, fetch.request.request_id, block_ids=(block_id,))
        return fetch

    # --- Ends -----------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Give up what was kept for a request: its tables hold the blocks now."""
        self._forget_swapped(request)
        if request.fetch is not None:
            assert not request.fetch.coming, "a request was admitted before its blocks were filled"
            self._give_up(request.fetch)

    def forget(self, request: Request) -> None:
        """Give up what is kept for a request that ended; blocks on the way stay taken until they are filled."""
        self._forget_swapped(request)
        fetch, request.fetch = request.fetch, None
        if fetch is not None and not fetch.coming:
            self._give_up(fetch)

    def yield_blocks(self) -> bool:
        """Free the filled blocks that wait for requests; they stay cached. Returns: whether there were any."""
        ready = [fetch for fetch in self.fetches if not fetch.coming]
        for fetch in ready:
            self._give_up(fetch)
        return bool(ready)

    def lose_steps(self) -> None:
        """Give up all fetches and the host's blocks: steps in flight were lost, and with them transfers."""
        for fetch in tuple(self.fetches):
            self._give_up(fetch)
        self._fetch_of.clear()
        self.take_transfers()
        self.free_slots += self.slots.values()
        self.slots.clear()

    def _give_up(self, fetch: Fetch) -> None:
        """Release the blocks of a fetch. Mutates: its request."""
        self.fetches.remove(fetch)
        if not fetch.is_orphan:
            fetch.request.fetch = None
        for block_id in reversed(fetch.block_ids):
            self._pool.release(block_id, holds_prefix=self._cache.holds(block_id))
        self._events.record(EventKind.RELEASE, fetch.request.request_id, block_ids=tuple(fetch.block_ids))
