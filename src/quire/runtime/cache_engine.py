"""`CacheEngine`: the memory of the cache blocks. The scheduler owns their numbers; nothing here decides.

The pool is block-major: all layers of a block are contiguous, so that a block moves as one copy. Layer i of every
group uses slice i of a page. Pages of memory are committed when first written.
Next to read: `batch.py`, which turns block tables into slots of this pool.
"""

import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cache_spec import PoolShape
from quire.config import EngineConfig
from quire.errors import EngineError
from quire.runtime.disk_tier import CLOSE_S, DiskTier
from quire.runtime.huge_pages import allocate
from quire.transfers import Tier, Transfer, TransferReport

if TYPE_CHECKING:
    import torch

WAIT_S = 0.005
"""Longest wait for transfers in a step that computes nothing."""
TORCH_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""PyTorch's names of KV types that have others."""


class CacheEngine:
    """The KV pool and its views.

    Attributes:
        memory: [N, page bytes], page = all layers of the largest group; a NumPy array on a CPU, else a tensor.
        layer_groups: per layer the index of its cache group.
        layer_addresses: per layer the address of its slice of block 0; block b is b * block_stride_bytes further on.
        block_stride_bytes: bytes from one block to the next.
        disk: the disk tier, if there is one.
    Dtypes: memory uint8.
    """

    def __init__(self, config: EngineConfig, disk: DiskTier | None = None) -> None:
        scheduler = config.scheduler
        self._groups, self._block_size = scheduler.kv_cache_groups, scheduler.block_size
        self._kv_dtype = config.kv_dtype
        self.block_stride_bytes = PoolShape(
            self._groups, self._block_size, scheduler.max_num_batched_tokens
        ).block_bytes
        num_bytes = scheduler.num_blocks * self.block_stride_bytes
        memory: Any
        if config.device == "cpu":
            memory = allocate(num_bytes)
            address = memory.ctypes.data
        else:
            import torch

            memory = torch.empty(num_bytes, dtype=torch.uint8, device=config.device)
            address = memory.data_ptr()
        self.memory = memory.reshape(scheduler.num_blocks, self.block_stride_bytes)
        host_bytes = scheduler.num_host_blocks * self.block_stride_bytes
        self._host_memory = allocate(host_bytes).reshape(scheduler.num_host_blocks, self.block_stride_bytes)
        self.disk = disk
        self._filled: list[int] = []
        self._host_bytes_per_s = 0.0
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

    def transfer(self, transfers: Sequence[Transfer], *, may_wait: bool = False) -> None:
        """Copy blocks in all layers of their group. All sources in memory are read before any target is written.

        Transfers from and to the disk go on beside the steps: `report` tells which have filled blocks. `may_wait`:
        nothing else is to be done, so that blocks for the disk wait for a slow disk rather than being dropped.
        Mutates: memory.
        """
        deadline_s = time.monotonic() + CLOSE_S if may_wait else None
        started, host_bytes = time.monotonic(), 0
        moved: list[tuple[Any, Any, Any]] = []
        reads: list[Transfer] = []
        places: dict[tuple[int, Tier, Tier], list[Transfer]] = {}
        for item in transfers:
            places.setdefault((item.group_index, item.source_tier, item.target_tier), []).append(item)
        for (group_index, source, target), items in places.items():
            sources, targets = (
                [block_id for item in items for block_id in getattr(item, name)]
                for name in ("source_ids", "target_ids")
            )
            if source is Tier.DISK:
                reads += items
                continue
            values = self._pages(group_index, source)[self._index(source, sources)]
            if target is Tier.DISK:
                digests = [digest for item in items for digest in item.digests]
                self._disk().write(group_index, digests, values, deadline_s)
                continue
            if source is not target:
                values = self._to(target, values)
            if source is Tier.HOST:
                self._filled += targets
                host_bytes += len(sources) * self._groups[group_index].page_bytes(self._block_size)
            moved.append((self._pages(group_index, target), self._index(target, targets), values))
        for pages, targets, values in moved:
            pages[targets] = values
        # Host memory is committed when it is first written, which is no measure of later copies.
        if host_bytes and not any(item.target_tier is Tier.HOST for item in transfers):
            self._host_bytes_per_s = host_bytes / max(time.monotonic() - started, 1e-6)
        for item in reads:
            pages = self._pages(item.group_index, Tier.DEVICE)
            self._disk().read(item.group_index, item.digests, item.target_ids, pages)

    def report(self, *, waits: bool = False) -> TransferReport | None:
        """Return what transfers between tiers have done since the last report; None if nothing.

        `waits`: no request can run before one has ended, so wait for them, but not so long that new requests notice.
        """
        filled, self._filled = self._filled, []
        failed: list[int] = []
        num_read = num_written = 0
        if self.disk is not None:
            read, failed = self.disk.take_read(WAIT_S if waits and not filled else 0.0)
            filled += read
            num_read, num_written = self.disk.take_counts()
        speed, self._host_bytes_per_s = self._host_bytes_per_s, 0.0
        if not (filled or failed or num_read or num_written or speed):
            return None
        return TransferReport(tuple(filled), tuple(failed), num_read, num_written, speed)

    def forget_transfers(self) -> None:
        """Forget transfers under way: a step was lost. No block is written by them afterwards."""
        self._filled = []
        if self.disk is not None:
            self.disk.cancel_reads()

    @property
    def stored_blocks(self) -> set[tuple[int, bytes]]:
        """Cache group and digest of the blocks that the disk tier holds."""
        return set() if self.disk is None else self.disk.keys()

    def close(self) -> None:
        """End the threads of transfers; blocks for the disk are written first, if that is soon done."""
        if self.disk is not None:
            self.disk.close(time.monotonic() + CLOSE_S)

    def _pages(self, group_index: int, tier: Tier) -> Any:
        """The pages of a tier's memory, as far as the group's layers use them."""
        memory = self.memory if tier is Tier.DEVICE else self._host_memory
        return memory[:, : self._groups[group_index].page_bytes(self._block_size)]

    def _index(self, tier: Tier, block_ids: list[int]) -> Any:
        """Return what indexes a tier's pages; a GPU copies these without waiting for the steps in flight."""
        if tier is not Tier.DEVICE or isinstance(self.memory, np.ndarray):
            return block_ids
        import torch

        pinned = torch.tensor(block_ids, pin_memory=self.memory.device.type == "cuda")
        return pinned.to(self.memory.device, non_blocking=True)

    def _to(self, tier: Tier, values: Any) -> Any:
        if isinstance(self.memory, np.ndarray):
            return values
        import torch

        return values.cpu().numpy() if tier is Tier.HOST else torch.from_numpy(values).to(self.memory.device)

    def _disk(self) -> DiskTier:
        if self.disk is None:
            raise EngineError("a transfer from or to the disk was scheduled, but there is no disk tier")
        return self.disk
