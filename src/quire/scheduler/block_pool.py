"""Block numbers: the references of each block, and the order of reuse. Knows no hashes and no requests.

Free blocks are in two lists: those without a cached prefix are reused first, then those that still hold one, least
recently used first.
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
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK_ID + 1, num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """Return the number of all blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without references; some may still hold a cached prefix."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without references that still hold a cached prefix."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """Remove the first `count` free blocks, one reference each."""
        if count > self.num_free:
            raise EngineError(f"{count} KV blocks taken from a free list of {self.num_free}")
        block_ids = [(self._blank or self._cached).popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self.reference_counts[block_id] = 1
        return block_ids

    def share(self, block_id: int) -> None:
        """Add a reference; a free block is free no more."""
        if self.reference_counts[block_id] == 0:
            del (self._cached if block_id in self._cached else self._blank)[block_id]
        self.reference_counts[block_id] += 1

    def release(self, block_id: int, *, holds_prefix: bool) -> None:
        """Drop a reference; a block without any is free, useless content in front."""
        count = self.reference_counts[block_id] - 1
        if count < 0:
            raise EngineError(f"KV block {block_id} released more often than taken")
        self.reference_counts[block_id] = count
        if count == 0 and holds_prefix:
            self._cached[block_id] = None
        elif count == 0:
            self._blank[block_id] = None
            self._blank.move_to_end(block_id, last=False)

    def lose_prefix(self, block_id: int) -> None:
        """Take note that a block holds a prefix no more."""
        if block_id in self._cached:
            del self._cached[block_id]
            self._blank[block_id] = None

    def free_ids(self) -> list[int]:
        """Return the free blocks, next to be taken first."""
        return [*self._blank, *self._cached]
