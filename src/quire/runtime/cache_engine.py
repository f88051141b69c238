"""`CacheEngine`: the memory of the KV blocks. The scheduler owns their numbers; nothing here decides.

The pool is block-major: all layers of a block are contiguous, so that a block moves as one copy. Layer i of every
group uses slice i of a page. Pages of memory are committed when first written, or shortly before (`commit_ahead.py`).
Next to read: `batch.py`, which turns block tables into slots of this pool.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from quire.config import EngineConfig
from quire.runtime.commit_ahead import CommitAhead
from quire.runtime.dtypes import TORCH_DTYPES
from quire.runtime.huge_pages import allocate
from quire.types import BlockCopy

_POOL_DTYPES = {**TORCH_DTYPES, "int8": torch.int8}


class CacheEngine:
    """The KV pool and its views.

    Attributes:
        pool: [N, page], page = all layers of the largest group; with one group it is [N, L, 2, B, K, D] flattened.
        kv_caches: per layer a view [N, 2, B, K, D], strided over N; plane 0 keys, plane 1 values.
            Plans lay the same bytes out in their own way; int8 values, which have scales, are theirs alone.
        layer_groups: per layer the index of its KV cache group.
        layer_addresses: per layer the address of its slice of block 0; block b is b * block_stride_bytes further on.
    Dtypes: the KV type.
    """

    def __init__(self, config: EngineConfig) -> None:
        scheduler = config.scheduler
        layer_sizes = [
            scheduler.block_size * group.spec.bytes_per_token // group.spec.dtype_bytes
            for group in scheduler.kv_cache_groups
        ]
        self._group_sizes = [
            len(group.layer_indices) * size for group, size in zip(scheduler.kv_cache_groups, layer_sizes, strict=True)
        ]
        shape = (scheduler.num_blocks, max(self._group_sizes))
        dtype = _POOL_DTYPES[config.kv_dtype]
        self._ahead: CommitAhead | None = None
        if torch.device(config.device).type == "cpu":
            memory = allocate(shape[0] * shape[1] * dtype.itemsize)
            self.pool = memory.view(dtype).view(shape)
            self._ahead = CommitAhead(memory)
        else:
            self.pool = torch.empty(shape, dtype=dtype, device=config.device)
        # Block 0 is read where a window left a block; its values are masked, but must not be NaN.
        self.pool[0].zero_()
        kv_caches: dict[int, torch.Tensor] = {}
        layer_groups: dict[int, int] = {}
        layer_addresses: dict[int, int] = {}
        for group_index, group in enumerate(scheduler.kv_cache_groups):
            spec = group.spec
            plane = (2, scheduler.block_size, spec.num_kv_heads, spec.head_size)
            size = layer_sizes[group_index]
            for position, layer in enumerate(group.layer_indices):
                page_slice = self.pool[:, position * size : (position + 1) * size]
                if not spec.scale_bytes:
                    kv_caches[layer] = page_slice.view(scheduler.num_blocks, *plane)
                layer_addresses[layer] = page_slice.data_ptr()
                layer_groups[layer] = group_index
        self.kv_caches = tuple(kv_caches[layer] for layer in range(len(kv_caches)))
        self.layer_addresses = tuple(layer_addresses[layer] for layer in range(len(layer_addresses)))
        self.layer_groups = tuple(layer_groups[layer] for layer in range(len(layer_groups)))

    @property
    def block_stride_bytes(self) -> int:
        """From one block to the next."""
        return self.pool.stride(0) * self.pool.element_size()

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return self.pool.numel() * self.pool.element_size()

    @contextlib.contextmanager
    def in_use(self, highest_block: int) -> Iterator[None]:
        """For the time of a step that uses blocks up to this one: between steps memory for more is made ready."""
        if self._ahead is None:
            yield
            return
        self._ahead.begin_step((highest_block + 1) * self.block_stride_bytes)
        try:
            yield
        finally:
            self._ahead.end_step()

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers of their group. All sources are read before any target is written.

        Mutates: pool.
        """
        moved = []
        for group_index in {item.group_index for item in copies}:
            chosen = [item for item in copies if item.group_index == group_index]
            ids = torch.tensor([[item.source_id, item.target_id] for item in chosen], device=self.pool.device)
            pages = self.pool[:, : self._group_sizes[group_index]]
            moved.append((pages, ids[:, 1], pages.index_select(0, ids[:, 0])))
        for pages, target_ids, values in moved:
            pages.index_copy_(0, target_ids, values)
