"""`CacheEngine`: the memory of the cache blocks. The scheduler owns their numbers; nothing here decides.

The pool is block-major: all layers of a block are contiguous, so that a block moves as one copy. Layer i of every
group uses slice i of a page. Pages of memory are committed when first written, or shortly before (`commit_ahead.py`).
Next to read: `batch.py`, which turns block tables into slots of this pool.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.cache_spec import PoolShape
from quire.config import EngineConfig
from quire.errors import EngineError
from quire.runtime.commit_ahead import CommitAhead
from quire.runtime.huge_pages import allocate
from quire.types import Tier, Transfer

if TYPE_CHECKING:
    import torch

TORCH_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""PyTorch's names of KV types that have others."""


class CacheEngine:
    """The KV pool and its views.

    Attributes:
        memory: [N, page bytes], page = all layers of the largest group; a NumPy array on a CPU, else a tensor.
        layer_groups: per layer the index of its cache group.
        layer_addresses: per layer the address of its slice of block 0; block b is b * block_stride_bytes further on.
        block_stride_bytes: bytes from one block to the next.
    Dtypes: memory uint8.
    """

    def __init__(self, config: EngineConfig) -> None:
        scheduler = config.scheduler
        self._groups, self._block_size = scheduler.kv_cache_groups, scheduler.block_size
        self._kv_dtype = config.kv_dtype
        self.block_stride_bytes = PoolShape(
            self._groups, self._block_size, scheduler.max_num_batched_tokens
        ).block_bytes
        num_bytes = scheduler.num_blocks * self.block_stride_bytes
        self._ahead: CommitAhead | None = None
        memory: Any
        if config.device == "cpu":
            memory = allocate(num_bytes)
            self._ahead, address = CommitAhead(memory), memory.ctypes.data
        else:
            import torch

            memory = torch.empty(num_bytes, dtype=torch.uint8, device=config.device)
            address = memory.data_ptr()
        self.memory = memory.reshape(scheduler.num_blocks, self.block_stride_bytes)
        # Block 0 is read where a window left a block; its values are masked, but must not be NaN.
        self.memory[0] = 0
        placed = sorted(self._placed_layers())
        self.layer_groups = tuple(group_index for _, group_index, _ in placed)
        self.layer_addresses = tuple(address + offset for _, _, offset in placed)

    def _placed_layers(self) -> Iterator[tuple[int, int, int]]:
        """Yield layer, group, and the offset of the layer's slice in a page."""
        for group_index, group in enumerate(self._groups):
            for position, layer in enumerate(group.layer_indices):
                yield layer, group_index, position * group.spec.block_bytes(self._block_size)

    @functools.cached_property
    def pool(self) -> "torch.Tensor":
        """The memory as values of the KV type: with one group it is [N, L, 2, B, K, D] flattened."""
        import torch

        dtype: torch.dtype = getattr(torch, TORCH_NAMES.get(self._kv_dtype, self._kv_dtype))
        values = torch.as_tensor(self.memory).flatten().view(dtype)
        return values.view(len(self.memory), self.block_stride_bytes // dtype.itemsize)

    @functools.cached_property
    def kv_caches(self) -> "tuple[torch.Tensor, ...]":
        """Per layer a view [N, *spec.view_shape], strided over N: [N, 2, B, K, D] for keys and values, bytes for a
        state. Plans lay the same bytes out in their own way; int8 values, which have scales, have no view."""
        import torch

        views = []
        for _, group_index, offset in sorted(self._placed_layers()):
            spec = self._groups[group_index].spec
            if spec.scale_bytes:
                continue
            shape = spec.view_shape(self._block_size)
            values = torch.as_tensor(self.memory) if spec.is_state else self.pool
            start = offset // values.itemsize
            views.append(values[:, start : start + math.prod(shape)].view(len(values), *shape))
        return tuple(views)

    @contextlib.contextmanager
    def in_use(self, highest_block: int) -> Iterator[None]:
        """Surround a step that uses blocks up to this one: between steps memory for more is made ready."""
        if self._ahead is None:
            yield
            return
        self._ahead.begin_step((highest_block + 1) * self.block_stride_bytes)
        try:
            yield
        finally:
            self._ahead.end_step()

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy blocks in all layers of their group. All sources are read before any target is written.

        Mutates: memory. Raises: EngineError for tiers other than the device, which hold no blocks.
        """
        for item in transfers:
            if item.source_tier is not Tier.DEVICE or item.target_tier is not Tier.DEVICE:
                moves = f"{item.source_tier.value} to {item.target_tier.value}"
                raise EngineError(f"a transfer from {moves} was scheduled, but blocks are kept on the device only")
        moved = []
        for group_index in {item.group_index for item in transfers}:
            chosen = [item for item in transfers if item.group_index == group_index]
            source_ids, target_ids = ([block_id for item in chosen for block_id in getattr(item, name)]
                                      for name in ("source_ids", "target_ids"))  # fmt: skip
            pages = self.memory[:, : self._groups[group_index].page_bytes(self._block_size)]
            moved.append((pages, target_ids, pages[source_ids]))
        for pages, target_ids, values in moved:
            pages[target_ids] = values
