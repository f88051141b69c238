"""`CacheEngine`: the memory of the cache blocks. The scheduler owns their numbers; nothing here decides.

The pool is block-major: all layers of a block are contiguous, so that a block moves as one copy. Layer i of every
group uses slice i of a page. Pages of memory are committed when first written, or shortly before (`commit_ahead.py`).
Next to read: `batch.py`, which turns block tables into slots of this pool.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from quire.cache_spec import PoolShape
from quire.config import EngineConfig
from quire.errors import EngineError
from quire.runtime.commit_ahead import CommitAhead
from quire.runtime.huge_pages import allocate
from quire.types import Tier, Transfer


class CacheEngine:
    """The KV pool and its views.

    Attributes:
        pool: [N, page], page = all layers of the largest group; with one group it is [N, L, 2, B, K, D] flattened.
        kv_caches: per layer a view [N, *spec.view_shape], strided over N: [N, 2, B, K, D] for keys and values, bytes
            for a state. Plans lay the same bytes out in their own way; int8 values, which have scales, have no view.
        layer_groups: per layer the index of its cache group.
        layer_addresses: per layer the address of its slice of block 0; block b is b * block_stride_bytes further on.
    Dtypes: the KV type; uint8 for states.
    """

    def __init__(self, config: EngineConfig) -> None:
        scheduler = config.scheduler
        groups, block_size = scheduler.kv_cache_groups, scheduler.block_size
        dtype: torch.dtype = getattr(torch, config.kv_dtype)
        page_bytes = PoolShape(groups, block_size, scheduler.max_num_batched_tokens).block_bytes
        shape = (scheduler.num_blocks, page_bytes // dtype.itemsize)
        self._group_sizes = [group.page_bytes(block_size) // dtype.itemsize for group in groups]
        self._ahead: CommitAhead | None = None
        if torch.device(config.device).type == "cpu":
            memory = allocate(shape[0] * page_bytes)
            self.pool = memory.view(dtype).view(shape)
            self._ahead = CommitAhead(memory)
        else:
            self.pool = torch.empty(shape, dtype=dtype, device=config.device)
        # Block 0 is read where a window left a block; its values are masked, but must not be NaN.
        self.pool[0].zero_()
        layers: dict[int, tuple[int, int]] = {}
        kv_caches: dict[int, torch.Tensor] = {}
        for group_index, group in enumerate(groups):
            spec = group.spec
            size = spec.block_bytes(block_size)
            values = self.pool.view(torch.uint8) if spec.is_state else self.pool
            view_shape = spec.view_shape(block_size)
            for position, layer in enumerate(group.layer_indices):
                start = position * size // values.itemsize
                page_slice = values[:, start : start + size // values.itemsize]
                if spec.is_state:
                    page_slice = page_slice[:, : view_shape[0]]
                if not spec.scale_bytes:
                    kv_caches[layer] = page_slice.view(scheduler.num_blocks, *view_shape)
                layers[layer] = group_index, page_slice.data_ptr()
        self.kv_caches = tuple(kv_caches[layer] for layer in sorted(kv_caches))
        self.layer_groups = tuple(layers[layer][0] for layer in sorted(layers))
        self.layer_addresses = tuple(layers[layer][1] for layer in sorted(layers))

    @property
    def block_stride_bytes(self) -> int:
        """Bytes from one block to the next."""
        return self.pool.stride(0) * self.pool.element_size()

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

        Mutates: pool. Raises: EngineError for tiers other than the device, which hold no blocks.
        """
        for item in transfers:
            if item.source_tier is not Tier.DEVICE or item.target_tier is not Tier.DEVICE:
                moves = f"{item.source_tier.value} to {item.target_tier.value}"
                raise EngineError(f"a transfer from {moves} was scheduled, but blocks are kept on the device only")
        moved = []
        for group_index in {item.group_index for item in transfers}:
            chosen = [item for item in transfers if item.group_index == group_index]
            ids = [torch.tensor([at for item in chosen for at in getattr(item, name)], device=self.pool.device)
                   for name in ("source_ids", "target_ids")]  # fmt: skip
            pages = self.pool[:, : self._group_sizes[group_index]]
            moved.append((pages, ids[1], pages.index_select(0, ids[0])))
        for pages, target_ids, values in moved:
            pages.index_copy_(0, target_ids, values)
