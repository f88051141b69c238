"""Shapes of the KV cache: bytes of a token in a layer, layers that share a block table, blocks that a sequence needs.

Pure arithmetic on integers: `resolve.py` sizes the pool with it and `scheduler/blocks.py` allocates by it, one formula
for both. Next to read: `resolve.py`, then `scheduler/blocks.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps of a token.

    Fields:
        window: token i attends to tokens i - window + 1 … i; None: to all earlier ones.
        scale_bytes: of one token's key or value in one head: int8 values have a scale.
    """

    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    window: int | None = None
    scale_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * (self.head_size * self.dtype_bytes + self.scale_bytes)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table: they have the same spec.

    Every request has one block table per group. All groups draw block numbers from one pool.
    """

    layer_indices: tuple[int, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What the need for KV memory follows from: groups, tokens per block, and the most tokens of a step."""

    groups: tuple[KVCacheGroup, ...]
    block_size: int
    max_num_batched_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers of the largest group."""
        return self.block_size * max(len(group.layer_indices) * group.spec.bytes_per_token for group in self.groups)

    def table_len(self, num_tokens: int) -> int:
        """Entries of a block table that covers `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def window_peak(self, window: int) -> int:
        """The most blocks that one sequence holds at once in a group with this window."""
        # window - 1 tokens looked back at and one chunk written, at the worst alignment to block boundaries.
        return (window + self.max_num_batched_tokens - 3) // self.block_size + 2

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks that one unshared sequence holds at once while computing `num_tokens`, over all groups."""
        return sum(self._group_peak(group, num_tokens) for group in self.groups)

    def longest_sequence(self, num_blocks: int, at_most: int) -> int:
        """The most tokens, up to `at_most`, that one sequence can compute in `num_blocks` blocks; 0 if none."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak_blocks(middle) <= num_blocks else (low, middle - 1)
        return low

    def _group_peak(self, group: KVCacheGroup, num_tokens: int) -> int:
        whole = self.table_len(num_tokens)
        window = group.spec.window
        return whole if window is None else min(whole, self.window_peak(window))
