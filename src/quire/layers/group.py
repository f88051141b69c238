"""`Group`: the ranks that share each layer, and `Partition`: the rows and columns of a weight that one rank holds.

Sizes are those of Megatron's tensor parallelism (Shoeybi 2019). At size 1 every share is the whole and the
collectives return their argument, so that a layer has one version for all sizes. It must not know processes or
checkpoints: executors implement `Group`, `runtime/loader.py` reads the partitions. Next to read: `linear.py`.
"""

from dataclasses import dataclass
from typing import Protocol

from quire.errors import ConfigError
from quire.lazy_torch import Tensor


class Group(Protocol):
    """Ranks 0 … size - 1 that compute each layer together. Every rank must make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all ranks, with the same bits on each. May write to `x`. Shapes: [T, I] -> the same."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the columns of all ranks, in the order of the ranks. Shapes: [T, I] -> [T, size * I]."""


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """A rank without a connection to other ranks: it can build and load its share, and run a group of size 1."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        assert self.size == 1, "a local group cannot reach other ranks"
        return x

    all_gather = all_reduce


SINGLE = LocalGroup()
"""The group of one rank."""


@dataclass(frozen=True, slots=True)
class PartOfSum:
    """A rank for layers that return its part of a sum: the model adds those of several layers, then sums."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x`, which the caller sums."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Not for layers that gather."""
        raise NotImplementedError


class UnevenSplitError(ConfigError):
    """A size of the model cannot be split among the ranks. The loader adds which tensor-parallel sizes fit."""


@dataclass(frozen=True, slots=True)
class Share:
    """Items `start` … `stop` - 1 of `whole` items along one axis: heads, rows or columns."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        """The number of items in the share."""
        return self.stop - self.start

    def __mul__(self, width: int) -> "Share":
        """Return the share in units that are `width` times as many, as heads to rows."""
        return Share(self.start * width, self.stop * width, self.whole * width)


def share(what: str, whole: int, group: Group) -> Share:
    """Split `whole` items evenly. Raises: UnevenSplitError, naming `what`, as in "attention heads"."""
    if whole % group.size:
        raise UnevenSplitError(f"tensor_parallel_size={group.size} does not divide {whole} {what}")
    size = whole // group.size
    return Share(group.rank * size, (group.rank + 1) * size, whole)


def share_heads(num_heads: int, num_kv_heads: int, group: Group) -> tuple[Share, Share]:
    """Split query heads and KV heads; where there are fewer KV heads than ranks, several ranks hold the same one.

    Raises: UnevenSplitError.
    """
    heads = share("attention heads", num_heads, group)
    if num_kv_heads >= group.size:
        return heads, share("KV heads", num_kv_heads, group)
    if group.size % num_kv_heads:
        raise UnevenSplitError(
            f"tensor_parallel_size={group.size} exceeds {num_kv_heads} KV heads and is not a multiple of them"
        )
    kv_head = group.rank * num_kv_heads // group.size
    return heads, Share(kv_head, kv_head + 1, num_kv_heads)


def share_vocabulary(vocab_size: int, group: Group) -> tuple[Share, int]:
    """Split the vocabulary, of any size: every rank has equally many rows, of which the last may be padding.

    Returns: the share, and the number of rows with padding.
    """
    num_rows = -(-vocab_size // group.size)
    start = min(group.rank * num_rows, vocab_size)
    return Share(start, min(start + num_rows, vocab_size), vocab_size), num_rows


@dataclass(frozen=True, slots=True)
class Partition:
    """The rows and columns of a parameter that one rank holds.

    A layer's `partitions` has one per sliced parameter, by the name the layer gives it. `rows`: per part of the stored
    matrix its share, one part after another, as queries, keys and values; empty: all rows. `columns` None: all columns.
    """

    rows: tuple[Share, ...] = ()
    columns: Share | None = None

    @property
    def cuts_columns(self) -> bool:
        """True if the rank holds some of the columns."""
        return self.columns is not None and self.columns.size < self.columns.whole

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole parameter, from the shape of the rank's share."""
        num_rows = sum(part.whole for part in self.rows) if self.rows else shape[0]
        return (num_rows, *(shape[1:] if self.columns is None else (self.columns.whole,)))

    @property
    def column_slice(self) -> slice:
        """The columns this rank holds."""
        return slice(None) if self.columns is None else slice(self.columns.start, self.columns.stop)

    def row_ranges(self, num_rows: int) -> list[range]:
        """The rows this rank holds among all `num_rows` rows, one range per part."""
        ranges, first = [], 0
        for part in self.rows or (Share(0, num_rows, num_rows),):
            ranges.append(range(first + part.start, first + part.stop))
            first += part.whole
        return ranges
