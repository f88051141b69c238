"""Audit of a scheduler, after every step: blocks and requests are where they should be, each counted once."""

from collections import Counter
from collections.abc import Iterable, Sequence

from quire.scheduler.blocks import BlockManager
from quire.scheduler.prefix_cache import PrefixCache
from quire.scheduler.request import OwnedBlocks, Request
from quire.scheduler.scheduler import Scheduler
from quire.types import NULL_BLOCK_ID


def check_integrity(scheduler: Scheduler) -> None:
    steps = scheduler._in_flight
    detached = [owned for step in steps for owned in step.detached]
    check_blocks(scheduler.blocks, scheduler.requests.by_id.values(), detached)
    problems = _request_problems(scheduler)
    assert not problems, f"scheduler integrity: {'; '.join(problems[:8])}"


def _request_problems(scheduler: Scheduler) -> list[str]:
    """Find requests that are in no queue or in two, and requests that own blocks without running, or the reverse."""
    table = scheduler.requests
    owner_ids = {name for name, request in table.by_id.items() if request.blocks.tables}
    in_flight = [request for step in scheduler._in_flight for request in step.requests]
    problems = []
    running_ids = [request.request_id for request in table.running]
    siblings = [sibling.request_id for request in table.by_id.values() for sibling in request.siblings]
    waiting_ids = [request.request_id for request in table.waiting]
    parked_ids = [request.request_id for request in table.parked]
    found = Counter(running_ids + waiting_ids + parked_ids + siblings)
    kept_ids = {name for name, request in table.by_id.items() if request.fetch is not None or request.swapped_keys}
    if not kept_ids <= {*waiting_ids, *parked_ids}:
        problems.append("blocks of other tiers are kept for requests that do not wait")
    if set(running_ids) != owner_ids:
        problems.append(f"running are {sorted(running_ids)} but blocks are owned by {sorted(owner_ids)}")
    problems += [f"{request_id!r} has a place but is gone" for request_id in found if request_id not in table.by_id]
    for request_id, request in table.by_id.items():
        if found[request_id] != 1 or request.status.is_finished:
            problems.append(f"{request_id!r} ({request.status.name}) is in {found[request_id]} places")
        if (request.leader is not None) != (request_id in siblings):
            problems.append(f"{request_id!r} is not among the siblings of its leader")
        if in_flight.count(request) != request.num_in_flight:
            problems.append(f"{request_id!r} is in {in_flight.count(request)} steps, not {request.num_in_flight}")
    if table.num_free_places() < 0:
        problems.append(f"{-table.num_free_places()} sequences more than max_num_seqs")
    return problems


def check_blocks(blocks: BlockManager, requests: Iterable[Request], detached: Sequence[OwnedBlocks] = ()) -> None:
    """Fail, naming each contradiction, unless

    - free + referenced = total - 1, and the free list holds exactly the unreferenced blocks;
    - each block's reference count is the number of block tables and kept states it stands in;
    - window groups hold null blocks exactly where they say so, and state tables have one entry at most;
    - no block stands in tables of two groups, or is cached for another group than that of its tables;
    - the prefix cache's two maps agree;
    - blocks on the way from other tiers have one owner, and each slot of host memory is free or holds one block that a
      preempted request needs.

    `requests`: all unfinished ones. `detached`: blocks of requests that ended while a step was in flight.
    """
    requests = tuple(requests)
    owners = [(request.request_id, request.blocks) for request in requests if request.blocks.tables]
    owners += [(f"detached {index}", owned) for index, owned in enumerate(detached)]
    problems = _reference_problems(blocks, [owned for _, owned in owners]) + _tier_problems(blocks, requests)
    problems += _group_problems(blocks, [owned for _, owned in owners])
    for name, owned in owners:
        problems += _table_problems(blocks, name, owned)
    problems += _prefix_problems(blocks.cache)
    assert not problems, f"KV block integrity: {'; '.join(problems[:8])}"


def _reference_problems(blocks: BlockManager, owners: list[OwnedBlocks]) -> list[str]:
    pool = blocks.pool
    counts = [0] * pool.num_blocks
    for owned in owners:
        for block_id in owned.block_ids():
            counts[block_id] += 1
    for fetch in blocks.tiers.fetches:
        for block_id in fetch.block_ids:
            counts[block_id] += 1
    problems = []
    if counts != pool.reference_counts:
        problems += [
            f"block {block_id} has {references} references and {count} owners"
            for block_id, (references, count) in enumerate(zip(pool.reference_counts, counts, strict=True))
            if references != count
        ]
    free_ids = pool.free_ids()
    problems += [f"block {at} is free and owned" for at in free_ids if at == NULL_BLOCK_ID or counts[at]]
    num_owned = pool.num_blocks - counts.count(0)
    num_cached = sum(map(blocks.cache.holds, free_ids))
    if pool.num_cached != num_cached:
        problems.append(f"{num_cached} free blocks hold a prefix, counted {pool.num_cached}")
    if len(free_ids) + num_owned != pool.num_usable:
        problems.append(f"{len(free_ids)} free + {num_owned} referenced blocks are not {pool.num_usable}")
    return problems


def _tier_problems(blocks: BlockManager, requests: Sequence[Request]) -> list[str]:
    tiers = blocks.tiers
    slots = sorted((*tiers.slots.values(), *tiers.free_slots, *tiers._unsent_slots))
    problems = [] if slots == list(range(len(slots))) else [f"host slots are {slots}"]
    if len(slots) != tiers._config.num_host_blocks:
        problems.append(f"{len(slots)} host slots of {tiers._config.num_host_blocks}")
    wanted = Counter(key for request in requests for key in request.swapped_keys)
    if wanted != tiers._num_wanted:
        problems.append(f"wanted are {wanted}, counted {tiers._num_wanted}")
    problems += [f"slot {slot} is kept for no request" for key, slot in tiers.slots.items() if not wanted[key]]
    coming = {block_id: fetch for fetch in tiers.fetches for block_id in fetch.coming}
    if coming != tiers._fetch_of:
        problems.append(f"on the way are {list(coming)}, found by number {list(tiers._fetch_of)}")
    problems += [f"block {at} is on the way and cached" for at in coming if blocks.cache.holds(at)]
    problems += [f"block {at} is on the way for two" for at in coming if blocks.pool.reference_counts[at] != 1]
    fetching = [request for request in requests if request.fetch is not None]
    problems += [f"{it.request_id!r} holds blocks twice" for it in fetching if it.blocks.tables]
    if {fetch for fetch in tiers.fetches if not fetch.is_orphan} != {request.fetch for request in fetching}:
        problems.append("requests have other fetches than the tiers")
    return problems


def _group_problems(blocks: BlockManager, owners: list[OwnedBlocks]) -> list[str]:
    if len(blocks.token_groups) + len(blocks.state_groups) == 1:
        return []
    found: set[tuple[int, int]] = set()
    for owned in owners:
        for index, table in enumerate(owned.tables):
            found.update((block_id, index) for block_id in table)
        for kept in owned.kept_states:
            found.update((block_id, index) for index, block_id in kept.block_ids.items())
    for block_id, _ in tuple(found):
        if (entry := blocks.cache._entries.get(block_id)) is not None:
            found.add((block_id, entry.group_index))
    groups: dict[int, list[int]] = {}
    for block_id, index in found:
        if block_id != NULL_BLOCK_ID:
            groups.setdefault(block_id, []).append(index)
    return [f"block {at} is used by groups {sorted(used)}" for at, used in groups.items() if len(used) > 1]


def _table_problems(blocks: BlockManager, name: str, owned: OwnedBlocks) -> list[str]:
    problems = []
    token_tables = [owned.tables[index] for index in blocks.token_groups]
    if len(set(map(len, token_tables))) > 1:
        problems.append(f"{name!r}: tables of different lengths")
    if any(len(owned.tables[index]) > 1 for index in blocks.state_groups):
        problems.append(f"{name!r}: more than one state in {owned.tables}")
    for index, table in enumerate(owned.tables):
        left_behind = owned.num_left_behind[index]
        if any(table[:left_behind]) or NULL_BLOCK_ID in table[left_behind:]:
            problems.append(f"{name!r} group {index}: null blocks are not the first {left_behind} of {table}")
        real = table[left_behind:]
        if len(set(real)) != len(real):
            problems.append(f"{name!r} group {index}: a block stands twice in {table}")
    return problems


def _prefix_problems(cache: PrefixCache) -> list[str]:
    problems = []
    if len(cache._block_ids) != len(cache._entries):
        problems.append(f"{len(cache._block_ids)} digests for {len(cache._entries)} cached blocks")
    for block_id, entry in cache._entries.items():
        found = cache._block_ids.get((entry.group_index, entry.digest))
        if found != block_id:
            problems.append(f"cached block {block_id} is found as {found}")
    return problems
