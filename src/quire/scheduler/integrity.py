"""The block audit: every block counted once, every reference owned. Runs after every step in tests.

Reads `BlockManager`, changes nothing. Next to read: `blocks.py`.
"""

from collections import Counter

from quire.errors import EngineError
from quire.scheduler.blocks import BlockManager
from quire.types import NULL_BLOCK_ID


def check_blocks(blocks: BlockManager) -> None:
    """Raise EngineError, naming each contradiction, unless

    - free + cached-but-free + referenced = total - 1, and the free list holds exactly the unreferenced blocks;
    - each block's reference count is the number of block tables it stands in;
    - window groups hold null blocks exactly where they say so;
    - the prefix cache's two maps agree.
    """
    problems = _reference_problems(blocks) + _table_problems(blocks) + blocks.cache.inconsistencies()
    if problems:
        shown = "; ".join(problems[:8])
        raise EngineError(f"KV block integrity: {shown}" + (f" and {len(problems) - 8} more" * (len(problems) > 8)))


def _reference_problems(blocks: BlockManager) -> list[str]:
    pool = blocks.pool
    owners: Counter[int] = Counter()
    for owned in blocks.owned.values():
        for table in owned.tables:
            owners.update(block_id for block_id in table if block_id != NULL_BLOCK_ID)
    problems = [
        f"block {block_id} has {pool.reference_counts[block_id]} references and {owners[block_id]} owners"
        for block_id in range(pool.num_blocks)
        if pool.reference_counts[block_id] != owners[block_id]
    ]
    free_ids = pool.free_ids()
    for block_id in free_ids:
        if block_id == NULL_BLOCK_ID or owners[block_id]:
            problems.append(f"block {block_id} is free and owned")
    num_cached = sum(blocks.cache.holds(block_id) for block_id in free_ids)
    num_plain = len(free_ids) - num_cached
    if num_plain + num_cached + len(owners) != pool.num_usable:
        problems.append(
            f"{num_plain} free + {num_cached} cached + {len(owners)} referenced blocks are not {pool.num_usable}"
        )
    return problems


def _table_problems(blocks: BlockManager) -> list[str]:
    problems = []
    for request_id, owned in blocks.owned.items():
        for index, table in enumerate(owned.tables):
            left_behind = owned.num_left_behind[index]
            if any(table[:left_behind]) or NULL_BLOCK_ID in table[left_behind:]:
                problems.append(f"{request_id!r} group {index}: null blocks are not the first {left_behind} of {table}")
            real = table[left_behind:]
            if len(set(real)) != len(real):
                problems.append(f"{request_id!r} group {index}: a block stands twice in {table}")
            if len(table) != len(owned.tables[0]):
                problems.append(f"{request_id!r}: tables of different lengths")
    return problems
