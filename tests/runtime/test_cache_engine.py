"""The KV pool: layers do not overlap within a group, blocks are contiguous, copies move a group's layers only."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.cache_spec import CacheGroup, LatentKV, PagedKV, RecurrentState
from quire.errors import EngineError
from quire.runtime.block_files import BlockFiles
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.disk_tier import DiskTier
from quire.transfers import Tier, Transfer
from tests.fakes import device_copy
from tests.runtime.builders import make_config

FULL = PagedKV(num_kv_heads=2, head_size=4, dtype_bytes=4)
WINDOW = PagedKV(num_kv_heads=1, head_size=4, dtype_bytes=4, window=8)


def make_cache(*groups: CacheGroup, num_blocks: int = 6) -> CacheEngine:
    return CacheEngine(make_config(kv_cache_groups=groups, num_blocks=num_blocks, block_size=3))


def test_one_group_is_block_major() -> None:
    cache = make_cache(CacheGroup((0, 1, 2), FULL))
    assert [tuple(view.shape) for view in cache.kv_caches] == [(6, 2, 3, 2, 4)] * 3
    assert cache.layer_groups == (0, 0, 0)
    for layer, view in enumerate(cache.kv_caches):
        view.fill_(layer)
    # All layers of a block lie side by side.
    assert cache.pool.is_contiguous()
    pages = cache.pool.view(6, 3, 2, 3, 2, 4)
    for layer in range(3):
        assert (pages[:, layer] == layer).all()


def test_groups_share_pages_of_the_largest() -> None:
    cache = make_cache(CacheGroup((1, 3), FULL), CacheGroup((0, 2, 4), WINDOW))
    assert cache.layer_groups == (1, 0, 1, 0, 1)
    assert cache.kv_caches[1].shape == (6, 2, 3, 2, 4)
    assert cache.kv_caches[0].shape == (6, 2, 3, 1, 4)
    assert cache.pool.shape == (6, 2 * 2 * 3 * 2 * 4)


def test_copy_moves_all_layers_of_its_group_and_nothing_else() -> None:
    cache = make_cache(CacheGroup((0,), FULL), CacheGroup((1, 2), FULL))
    cache.pool.copy_(torch.arange(6.0)[:, None].expand_as(cache.pool))
    cache.transfer([device_copy(0, 1, 4), device_copy(1, 2, 5), device_copy(1, 3, 1)])
    blocks = [view[:, 0, 0, 0, 0].tolist() for view in cache.kv_caches]
    # Blocks 4 and 1 hold the first layer of their group in the same bytes: layer 0 and layer 1.
    assert blocks == [[0, 3, 2, 3, 1, 2], [0, 3, 2, 3, 1, 2], [0, 3, 2, 3, 4, 2]]


def test_copies_of_one_step_read_before_they_write() -> None:
    cache = make_cache(CacheGroup((0, 1), FULL))
    cache.pool.copy_(torch.arange(6.0)[:, None].expand_as(cache.pool))
    cache.transfer([device_copy(0, 1, 2), device_copy(0, 2, 3), device_copy(0, 3, 1)])
    assert cache.kv_caches[1][:, 1, 2, 1, 3].tolist() == [0, 3, 1, 2, 4, 5]
    cache.transfer([])


def test_each_kind_of_cache_has_its_view_and_moves_alone() -> None:
    latent, state = LatentKV(6, 2, 4), RecurrentState(70)
    cache = make_cache(CacheGroup((0,), FULL), CacheGroup((1,), latent), CacheGroup((2, 3), state))
    assert [tuple(view.shape) for view in cache.kv_caches] == [(6, 2, 3, 2, 4), (6, 3, 8), (6, 70), (6, 70)]
    assert [view.dtype for view in cache.kv_caches] == [torch.float32, torch.float32, torch.uint8, torch.uint8]
    # States are aligned; the page is as long as the largest group.
    assert cache.layer_addresses[3] - cache.layer_addresses[2] == 128
    assert cache.block_stride_bytes == max(FULL.block_bytes(3), 2 * 128)
    for layer in (2, 3):
        cache.kv_caches[layer][1] = layer
    cache.transfer([Transfer(2, Tier.DEVICE, (1, 1), Tier.DEVICE, (4, 5))])
    for layer in (2, 3):
        assert (cache.kv_caches[layer][4:] == layer).all()


DEVICES = ["cpu", pytest.param("cuda:0", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
])]  # fmt: skip


def tiered_cache(device: str, directory: Path) -> CacheEngine:
    """Six blocks, each filled with its number; two slots in host memory, and a disk tier."""
    config = make_config(kv_cache_groups=(CacheGroup((0, 1), FULL),), num_blocks=6, block_size=3, device=device)
    disk = DiskTier(BlockFiles(directory, bytes(32), {}, 1 << 20))
    cache = CacheEngine(replace(config, scheduler=replace(config.scheduler, num_host_blocks=2)), disk)
    cache.pool.copy_(torch.arange(6.0)[:, None].expand_as(cache.pool))
    return cache


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_move_between_tiers(device: str, tmp_path: Path) -> None:
    cache, digests = tiered_cache(device, tmp_path), (b"a" * 32, b"b" * 32)
    cache.transfer([
        Transfer(0, Tier.DEVICE, (1, 2), Tier.HOST, (1, 0)),
        Transfer(0, Tier.DEVICE, (3, 4), Tier.DISK, (), digests),
        device_copy(0, 5, 1),
    ])  # fmt: skip
    # Slot 1 is read before block 4 takes its place.
    cache.transfer([
        Transfer(0, Tier.DEVICE, (4,), Tier.HOST, (1,)),
        Transfer(0, Tier.HOST, (1, 0), Tier.DEVICE, (4, 5)),
    ])  # fmt: skip
    report = cache.report()
    assert report is not None
    assert (report.filled, report.failed) == ((4, 5), ())
    assert report.host_bytes_per_s == 0  # copies to the host were among them, which commit memory
    assert cache.pool[:, 0].tolist() == [0, 5, 2, 3, 1, 2]
    cache.transfer([
        Transfer(0, Tier.HOST, (1,), Tier.DEVICE, (3,)),
        Transfer(0, Tier.DISK, (), Tier.DEVICE, (1, 2, 5), (*digests, b"c" * 32)),
    ])  # fmt: skip
    filled, failed, speeds = [], [], []
    while len(filled) + len(failed) < 4:
        report = cache.report(waits=True)
        filled += report.filled if report else ()
        failed += report.failed if report else ()
        speeds += [report.host_bytes_per_s] if report else []
    assert (sorted(filled), failed) == ([1, 2, 3], [5])
    assert max(speeds) > 0
    assert [set(row) for row in cache.pool.tolist()] == [{0}, {3}, {4}, {4}, {1}, {2}]
    cache.forget_transfers()
    assert cache.report() is None
    cache.close()


def test_transfer_to_a_disk_that_is_not_there_is_refused() -> None:
    with pytest.raises(EngineError, match="there is no disk tier"):
        make_cache(CacheGroup((0,), FULL)).transfer([Transfer(0, Tier.DEVICE, (1,), Tier.DISK, (), (b"a" * 32,))])


def test_null_block_is_zero() -> None:
    assert (make_cache(CacheGroup((0, 1), FULL)).pool[0] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_blocks_are_copied_on_cuda() -> None:
    group = CacheGroup((0, 1), FULL)
    cache = CacheEngine(make_config(kv_cache_groups=(group,), num_blocks=6, block_size=3, device="cuda:0"))
    cache.pool[1].fill_(7)
    cache.transfer([device_copy(0, 1, 2)])
    assert (cache.pool[2] == 7).all()
