"""Block numbers: the references of each block, and the order of reuse. Knows no requests and no hashes.

The free list is ordered by usefulness: blocks without a cached prefix lie at the front and are reused first, blocks
that still hold a cached prefix lie behind them, least recently used first.
Next to read: `prefix_cache.py`, then `blocks.py`, which combines the two.
"""

from collections import OrderedDict

from quire.errors import EngineError
from quire.types import NULL_BLOCK_ID


class BlockPool:
    """Blocks 1 … num_blocks - 1; block 0 is the null block and has no owner."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks
        # An OrderedDict is a linked list in C: pop from the front and delete anywhere in constant time.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK_ID + 1, num_blocks))

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without references; some may still hold a cached prefix."""
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        """Return True if the block has no references."""
        return self.reference_counts[block_id] == 0

    def take(self, count: int) -> list[int]:
        """Remove `count` blocks from the front of the free list, one reference each."""
        if count > len(self._free):
            raise EngineError(f"{count} KV blocks taken from a free list of {len(self._free)}")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self.reference_counts[block_id] = 1
        return block_ids

    def share(self, block_id: int) -> None:
        """Add a reference; a free block leaves the free list."""
        if self.reference_counts[block_id] == 0:
            del self._free[block_id]
        self.reference_counts[block_id] += 1

    def release(self, block_id: int, *, holds_prefix: bool) -> None:
        """Drop a reference; a block without any returns to the free list, useless content in front."""
        count = self.reference_counts[block_id] - 1
        if count < 0:
            raise EngineError(f"KV block {block_id} released more often than taken")
        self.reference_counts[block_id] = count
        if count == 0:
            self._free[block_id] = None
            if not holds_prefix:
                self._free.move_to_end(block_id, last=False)

    def free_ids(self) -> list[int]:
        """The free list, next to be taken first."""
        return list(self._free)
