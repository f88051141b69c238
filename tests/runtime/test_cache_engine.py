"""The KV pool: layers do not overlap within a group, blocks are contiguous, copies move a group's layers only."""

import pytest
import torch

from quire.cache_spec import CacheGroup, LatentKV, PagedKV, RecurrentState
from quire.errors import EngineError
from quire.runtime.cache_engine import CacheEngine
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


def test_a_copy_moves_all_layers_of_its_group_and_nothing_else() -> None:
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


@pytest.mark.parametrize("tiers", [(Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.DISK)])
def test_transfer_to_another_tier_is_refused(tiers: tuple[Tier, Tier]) -> None:
    with pytest.raises(EngineError, match=f"from {tiers[0].value} to {tiers[1].value} was scheduled"):
        make_cache(CacheGroup((0,), FULL)).transfer([Transfer(0, tiers[0], (1,), tiers[1], (2,))])


def test_the_null_block_is_zero() -> None:
    assert (make_cache(CacheGroup((0, 1), FULL)).pool[0] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_blocks_are_copied_on_cuda() -> None:
    group = CacheGroup((0, 1), FULL)
    cache = CacheEngine(make_config(kv_cache_groups=(group,), num_blocks=6, block_size=3, device="cuda:0"))
    cache.pool[1].fill_(7)
    cache.transfer([device_copy(0, 1, 2)])
    assert (cache.pool[2] == 7).all()
