"""Audit of all blocks: each is counted once and each reference has an owner. Runs after every step in tests.

Reads `BlockManager`, changes nothing. Next to read: `blocks.py`.
"""

from collections.abc import Sequence

from quire.errors import EngineError
from quire.scheduler.block_pool import OwnedBlocks
from quire.scheduler.blocks import BlockManager
from quire.types import NULL_BLOCK_ID


def check_blocks(blocks: BlockManager, detached: Sequence[OwnedBlocks] = ()) -> None:
    """Raise EngineError, naming each contradiction, unless

    - free + referenced = total - 1, and the free list holds exactly the unreferenced blocks;
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
    counts = [0] * pool.num_blocks
    for owned in owners:
        for block_id in owned.block_ids():
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
    if len(free_ids) + num_owned != pool.num_usable:
        problems.append(f"{len(free_ids)} free + {num_owned} referenced blocks are not {pool.num_usable}")
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
        if (group := blocks.cache.group_of(block_id)) is not None:
            found.add((block_id, group))
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
