"""Kinds of KV cache: the bytes a layer keeps, the blocks a sequence needs, and the groups of layers that share pages.

Pure arithmetic on integers: `memory_plan.py` sizes the pool with it, `scheduler/blocks.py` allocates by it and
`runtime/cache_engine.py` lays out memory by it. A new kind of cache is a class here, and nothing outside of the classes
knows how many planes or blocks a layer has. Next to read: `memory_plan.py`, then `scheduler/blocks.py`.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec

STATE_ALIGNMENT_BYTES = 64
CHECKPOINT_INTERVALS = (256, 1024)
"""Fewest and most tokens between two checkpoints of recurrent state. A prompt is computed in chunks that end at
checkpoints, and short chunks are slow; a prefix hit recomputes the tokens behind the last checkpoint."""
MAX_PAGE_WASTE = 0.1
"""Share of the pages that may stay unused before layers are split into more groups."""
WASTE_TOKENS = 8192
"""Length of the sequence for which waste is counted."""
MAX_GROUPS = 16
"""Each group costs one block table per request and step."""
MAX_BLOCK_FACTOR = 32
"""Blocks of models with states are at most this many times the default."""


class CacheKind(msgspec.Struct, frozen=True):
    """Base of the kinds, with the arithmetic of those that keep every token, in blocks of `block_size` tokens.

    Kinds are tagged structs: msgspec, which carries configurations to other processes, decodes no union of dataclasses.
    """

    is_state: ClassVar[bool] = False

    @property
    def window(self) -> int | None:
        """Tokens that one token attends to, itself included; None: all earlier ones."""
        return None

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales beside the values."""
        return 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer; 0 if the cache does not grow with tokens."""
        return 0

    def stored_as(self, dtype_bytes: int, scale_bytes: int) -> Self:
        """Return the same cache with values of another type."""
        return msgspec.structs.replace(self, dtype_bytes=dtype_bytes, scale_bytes=scale_bytes)

    def on_rank(self, num_ranks: int) -> Self:
        """Return the cache of one of `num_ranks` ranks that share the model's heads."""
        return self

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer."""
        return block_size * self.bytes_per_token

    def table_len(self, num_tokens: int, block_size: int) -> int:
        """Entries of a block table that covers `num_tokens`."""
        return -(-num_tokens // block_size)

    def first_needed(self, position: int, block_size: int) -> int:
        """Index of the first table entry that tokens from `position` on read."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def first_of_hit(self, num_tokens: int, block_size: int) -> int:
        """Index of the first block that the prefix cache must hold for a hit of `num_tokens`."""
        return self.first_needed(num_tokens, block_size)

    def held_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks that keep what later tokens need of `num_tokens` computed ones."""
        return self.table_len(num_tokens, block_size) - self.first_needed(num_tokens, block_size)

    def peak_blocks(self, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
        """Most blocks that one unshared sequence holds at once while `num_tokens` are computed."""
        whole = self.table_len(num_tokens, block_size)
        if self.window is None:
            return whole
        # window - 1 earlier tokens and one chunk, at the worst alignment to block boundaries.
        return min(whole, (self.window + max_num_batched_tokens - 3) // block_size + 2)


class PagedKV(CacheKind, frozen=True, tag=True):
    """Keys and values per head: two planes.

    Fields:
        window: token i attends to tokens i - window + 1 … i; None: to all earlier ones.
        scale_bytes: bytes of the scale of one token's key or value in one head (int8).
    """

    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    window: int | None = None
    scale_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * (self.head_size * self.dtype_bytes + self.scale_bytes)

    def on_rank(self, num_ranks: int) -> Self:
        """See `CacheKind`. Where there are fewer heads than ranks, several ranks hold the same one."""
        return msgspec.structs.replace(self, num_kv_heads=max(1, self.num_kv_heads // num_ranks))

    def view_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's values in one block: [2, B, K, D], plane 0 keys, plane 1 values."""
        return (2, block_size, self.num_kv_heads, self.head_size)


class LatentKV(CacheKind, frozen=True, tag=True):
    """Compressed keys and values of all heads with one rotary part (MLA): one plane."""

    rank: int
    rotary_size: int
    dtype_bytes: int
    scale_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the latent vector of one token in one layer."""
        return (self.rank + self.rotary_size) * self.dtype_bytes + self.scale_bytes

    def view_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's values in one block: [B, rank + rotary size]."""
        return (block_size, self.rank + self.rotary_size)


class RecurrentState(CacheKind, frozen=True, tag=True):
    """State of fixed size per request, which every token replaces (linear attention, SSM): opaque bytes.

    The block table has one entry: the state after all computed tokens. The state before the first token is zero, so
    that the step that computes position 0 must not read the page. The prefix cache keeps copies (checkpoints) at
    multiples of `checkpoint_interval` tokens and, if that is far, at the last full block of a prompt; None until
    `make_groups` has chosen it. Ranks that share the model's heads hold parts of the state, but each all of
    `whole_bytes`.
    """

    state_bytes: int
    checkpoint_interval: int | None = None
    whole_bytes: int = 0

    is_state: ClassVar[bool] = True

    def stored_as(self, dtype_bytes: int, scale_bytes: int) -> Self:
        """Return the state itself: the KV cache type does not apply to it."""
        return self

    def on_rank(self, num_ranks: int) -> Self:
        """See `CacheKind`: channels and heads are split evenly, and what lies behind the first part is aligned."""
        padding = STATE_ALIGNMENT_BYTES * (num_ranks > 1)
        part = (self.state_bytes - self.whole_bytes) // num_ranks // 4 * 4
        return msgspec.structs.replace(self, state_bytes=part + self.whole_bytes + padding)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of the state in one layer, aligned; the block size does not matter."""
        return -(-self.state_bytes // STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES

    def table_len(self, num_tokens: int, block_size: int) -> int:
        """Entries of a block table: one from the first token on."""
        return min(1, num_tokens)

    def first_of_hit(self, num_tokens: int, block_size: int) -> int:
        """Index of the hit's last block: the checkpoint at its end is cached under it, and no other is needed."""
        return max(0, num_tokens // block_size - 1)

    def held_blocks(self, num_tokens: int, block_size: int) -> int:
        """The state and its checkpoints in the prefix cache."""
        return min(1, num_tokens) + num_tokens // (self.checkpoint_interval or CHECKPOINT_INTERVALS[1])

    def peak_blocks(self, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
        """The state, and the page that it is copied from after a hit or before a step with drafts."""
        return 2 * min(1, num_tokens)

    def view_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's bytes in one page."""
        return (self.state_bytes,)


CacheSpec = PagedKV | LatentKV | RecurrentState
"""The kinds of cache that a layer can have."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of equal spec that share one block table per request. All groups draw pages from one pool."""

    layer_indices: tuple[int, ...]
    spec: CacheSpec

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one block in all layers of the group."""
        return len(self.layer_indices) * self.spec.block_bytes(block_size)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Need for KV memory: it follows from the groups, the tokens per block and the most tokens of a step."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    max_num_batched_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one page: all layers of the largest group."""
        return max(group.page_bytes(self.block_size) for group in self.groups)

    def waste(self, num_tokens: int = WASTE_TOKENS) -> float:
        """Share of the bytes that stays unused in the pages that hold a sequence of `num_tokens`."""
        held = [group.spec.held_blocks(num_tokens, self.block_size) for group in self.groups]
        used = sum(n * group.page_bytes(self.block_size) for n, group in zip(held, self.groups, strict=True))
        return 1 - used / (sum(held) * self.block_bytes) if any(held) else 0.0  # windows of one token hold none

    def peak_blocks(self, num_tokens: int) -> int:
        """Most blocks that one unshared sequence holds at once while computing `num_tokens`, over all groups."""
        size, chunk = self.block_size, self.max_num_batched_tokens
        return sum(group.spec.peak_blocks(num_tokens, size, chunk) for group in self.groups)

    def longest_sequence(self, num_blocks: int, at_most: int) -> int:
        """Most tokens, up to `at_most`, that one sequence can compute in `num_blocks` blocks; 0 if none."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak_blocks(middle) <= num_blocks else (low, middle - 1)
        return low


def make_groups(layer_specs: Sequence[CacheSpec], block_size: int) -> tuple[CacheGroup, ...]:
    """Group layers of equal spec, split so that groups fill pages of one size: as few groups as waste at most
    `MAX_PAGE_WASTE`, else those of at most `MAX_GROUPS` that waste least (`PoolShape.waste`).

    Chooses the checkpoint interval of states too. Groups are in the order of their first layers.
    """
    return _make_groups(tuple(layer_specs), block_size)


@functools.lru_cache(64)
def _make_groups(layer_specs: tuple[CacheSpec, ...], block_size: int) -> tuple[CacheGroup, ...]:
    interval = _checkpoint_interval(layer_specs, block_size)
    layers: dict[CacheSpec, list[int]] = {}
    for index, spec in enumerate(layer_specs):
        if isinstance(spec, RecurrentState):
            spec = msgspec.structs.replace(spec, checkpoint_interval=interval)
        layers.setdefault(spec, []).append(index)
    found: list[tuple[float, int, tuple[CacheGroup, ...]]] = []
    for page in {
        n * spec.block_bytes(block_size) for spec, all_of in layers.items() for n in range(1, len(all_of) + 1)
    }:
        if page >= max(spec.block_bytes(block_size) for spec in layers):
            groups = tuple(group for spec, all_of in layers.items() for group in _split(all_of, spec, page, block_size))
            waste = PoolShape(groups, block_size, 1).waste()
            if len(groups) <= max(MAX_GROUPS, len(layers)):
                found.append((max(waste, MAX_PAGE_WASTE), len(groups), groups))
    groups = min(found, key=lambda item: item[:2])[2]
    return tuple(sorted(groups, key=lambda group: group.layer_indices))


def fit_block_size(layer_specs: Sequence[CacheSpec], block_size: int) -> int:
    """Multiple of `block_size` at which pages hold a state without much waste; without states `block_size` itself.

    A state is one piece and does not shrink with the block, so that small blocks of other layers leave its pages empty.
    """
    if not any(spec.is_state for spec in layer_specs):
        return block_size
    sizes = [factor * block_size for factor in range(1, MAX_BLOCK_FACTOR + 1)]
    wastes = [PoolShape(make_groups(layer_specs, size), size, 1).waste() for size in sizes]
    return next(
        (size for size, waste in zip(sizes, wastes, strict=True) if waste <= MAX_PAGE_WASTE),
        sizes[wastes.index(min(wastes))],
    )


def _checkpoint_interval(layer_specs: Iterable[CacheSpec], block_size: int) -> int:
    """Multiple of the block size at which checkpoints take about the bytes of the other layers' tokens, within
    `CHECKPOINT_INTERVALS`."""
    per_token = sum(spec.bytes_per_token for spec in layer_specs)
    states = sum(spec.block_bytes(block_size) for spec in layer_specs if spec.is_state)
    fewest, most = CHECKPOINT_INTERVALS
    wanted = min(most, max(fewest, states // per_token if per_token else most))
    return max(1, wanted // block_size) * block_size


def _split(layers: Sequence[int], spec: CacheSpec, page_bytes: int, block_size: int) -> list[CacheGroup]:
    """Groups of these layers, of nearly equal size, that fit a page each."""
    num_groups = math.ceil(len(layers) / (page_bytes // spec.block_bytes(block_size)))
    bounds = [len(layers) * at // num_groups for at in range(num_groups + 1)]
    return [CacheGroup(tuple(layers[a:b]), spec) for a, b in itertools.pairwise(bounds)]
