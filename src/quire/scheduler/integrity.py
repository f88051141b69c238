"""Audit of all blocks: each is counted once and each reference has an owner. Runs after every step in tests.

Reads `BlockManager`, changes nothing. Next to read: `blocks.py`.
"""

from collections import Counter
from collections.abc import Sequence

from quire.errors import EngineError
from quire.scheduler.blocks import BlockManager, OwnedBlocks
from quire.types import NULL_BLOCK_ID


def check_blocks(blocks: BlockManager, detached: Sequence[OwnedBlocks] = ()) -> None:
    """Raise EngineError, naming each contradiction, unless

    - free + cached-but-free + referenced = total - 1, and the free list holds exactly the unreferenced blocks;
    - each block's reference count is the number of block tables and kept states it stands in;
    - window groups hold null blocks exactly where they say so, and state tables have one entry at most;
    - no block stands in tables of two groups, or is cached for another group than that of its tables;
    - the prefix cache's two maps agree.

    `detached`: blocks of requests that ended while a step was in flight.
    """
    owners = [*blocks.owned.items(), *((f"detached {index}", owned) for index, owned in enumerate(detached))]
    problems = _reference_problems(blocks, [owned for _, owned in owners])
    problems += _group_problems(blocks, [owned for _, owned in owners])
    for name, owned in owners:
        problems += _table_problems(blocks, name, owned)
    problems += blocks.cache.inconsistencies()
    if problems:
        shown = "; ".join(problems[:8])
        raise EngineError(f"KV block integrity: {shown}" + (f" and {len(problems) - 8} more" * (len(problems) > 8)))


def _reference_problems(blocks: BlockManager, owners: list[OwnedBlocks]) -> list[str]:
    pool = blocks.pool
    counts = Counter(block_id for owned in owners for block_id in owned.block_ids())
    problems = [
        f"block {block_id} has {pool.reference_counts[block_id]} references and {counts[block_id]} owners"
        for block_id in range(pool.num_blocks)
        if pool.reference_counts[block_id] != counts[block_id]
    ]
    free_ids = pool.free_ids()
    for block_id in free_ids:
        if block_id == NULL_BLOCK_ID or counts[block_id]:
            problems.append(f"block {block_id} is free and owned")
    num_cached = sum(blocks.cache.holds(block_id) for block_id in free_ids)
    num_plain = len(free_ids) - num_cached
    if num_plain + num_cached + len(counts) != pool.num_usable:
        problems.append(
            f"{num_plain} free + {num_cached} cached + {len(counts)} referenced blocks are not {pool.num_usable}"
        )
    return problems


def _group_problems(blocks: BlockManager, owners: list[OwnedBlocks]) -> list[str]:
    groups: dict[int, set[int]] = {}
    for owned in owners:
        for index, table in enumerate(owned.tables):
            for block_id in table:
                groups.setdefault(block_id, set()).add(index)
        for kept in owned.kept_states:
            for index, block_id in kept.block_ids.items():
                groups.setdefault(block_id, set()).add(index)
    groups.pop(NULL_BLOCK_ID, None)
    for block_id, found in groups.items():
        if (cached_for := blocks.cache.group_of(block_id)) is not None:
            found.add(cached_for)
    return [
        f"block {block_id} is used by groups {sorted(found)}" for block_id, found in groups.items() if len(found) > 1
    ]


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
