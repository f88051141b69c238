"""Blocks that a sequence needs, and pages that groups of layers share.

`scheduler/test_blocks.py` holds the peaks against what is really handed out.
"""

import pytest

from quire.cache_spec import (
    CacheGroup,
    CacheSpec,
    LatentKV,
    PagedKV,
    PoolShape,
    RecurrentState,
    fit_block_size,
    make_groups,
)

FULL = PagedKV(num_kv_heads=2, head_size=8, dtype_bytes=2)
WINDOW = PagedKV(num_kv_heads=1, head_size=8, dtype_bytes=2, window=128)
SMOLLM2 = [PagedKV(3, 64, 2)] * 30
DEEPSEEK_V3 = [LatentKV(rank=512, rotary_size=64, dtype_bytes=2)] * 61
GEMMA = [PagedKV(16, 128, 2, None if layer % 6 == 5 else 1024) for layer in range(62)]
# A gated delta net: 32 heads of 128 × 128 in fp32, and 3 inputs of a convolution over 8,192 channels.
DELTA_NET = RecurrentState(32 * 128 * 128 * 4 + 3 * 8192 * 2)
QWEN3_NEXT: list[CacheSpec] = [PagedKV(2, 256, 2) if layer % 4 == 3 else DELTA_NET for layer in range(48)]


def test_ranks_share_heads_and_hold_one_at_least() -> None:
    whole = PagedKV(num_kv_heads=4, head_size=8, dtype_bytes=2, window=5)
    assert [whole.on_rank(size).num_kv_heads for size in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert whole.on_rank(2).window == 5
    assert DELTA_NET.on_rank(1) == DELTA_NET
    # Both parts of a state may be padded to 64 bytes on each rank.
    assert DELTA_NET.on_rank(2).state_bytes == DELTA_NET.state_bytes // 2 + 64


def test_bytes_per_token_of_known_models() -> None:
    # Llama-2-7B in fp16: 512 KiB over 32 layers. SmolLM2 in bf16: 23,040 bytes over 30. DeepSeek-V3: 1,152 a layer.
    assert 32 * PagedKV(32, 128, 2).bytes_per_token == 512 * 1024
    assert sum(spec.bytes_per_token for spec in SMOLLM2) == 23_040
    assert DEEPSEEK_V3[0].bytes_per_token == 1152
    assert PagedKV(3, 64, 2).stored_as(1, 4).bytes_per_token == 2 * 3 * (64 + 4)


def test_sliding_window_needs_only_window_and_chunk() -> None:
    shape = PoolShape((CacheGroup((0,), WINDOW),), block_size=16, max_num_batched_tokens=64)
    assert shape.peak_blocks(16) == 1
    assert shape.peak_blocks(10_000) == shape.peak_blocks(20_000) == 13
    assert shape.longest_sequence(13, 20_000) == 20_000
    assert shape.longest_sequence(12, 20_000) == 12 * 16
    assert shape.longest_sequence(0, 100) == 0


def test_peaks_of_groups_add_up() -> None:
    groups = (CacheGroup((0, 2), FULL), CacheGroup((1,), WINDOW), CacheGroup((3,), RecurrentState(100)))
    shape = PoolShape(groups, 16, 64)
    # A state needs one page, and one more while it is copied.
    assert shape.peak_blocks(10_000) == 625 + 13 + 2
    assert shape.block_bytes == 16 * 2 * FULL.bytes_per_token


@pytest.mark.parametrize("specs", [SMOLLM2, DEEPSEEK_V3])
def test_layers_of_one_spec_are_one_group_without_waste(specs: list[CacheSpec]) -> None:
    assert make_groups(specs, 32) == (CacheGroup(tuple(range(len(specs))), specs[0]),)
    assert PoolShape(make_groups(specs, 32), 32, 64).waste() == 0
    assert fit_block_size(specs, 32) == 32


def test_windows_of_one_token_hold_and_waste_nothing() -> None:
    groups = make_groups([PagedKV(2, 8, 2, window=1)] * 3, 16)
    assert [len(group.layer_indices) for group in groups] == [3]
    assert PoolShape(groups, 16, 64).waste() == 0


def test_five_windows_per_full_layer_share_pages_of_about_ten_layers() -> None:
    groups = make_groups(GEMMA, 32)
    assert [len(group.layer_indices) for group in groups] == [10, 10, 10, 11, 10, 11]
    assert sorted(layer for group in groups for layer in group.layer_indices) == list(range(62))
    assert PoolShape(groups, 32, 64).waste() < 0.08
    # One group per spec would leave four fifths of each page of the full layers empty.
    unsplit = tuple(
        CacheGroup(tuple(i for i, spec in enumerate(GEMMA) if spec.window == window), GEMMA[0].stored_as(2, 0))
        for window in (None, 1024)
    )
    assert PoolShape(unsplit, 32, 64).waste() > 0.35


def test_three_states_per_full_layer_get_blocks_that_fill_the_page_of_a_state() -> None:
    small = PoolShape(make_groups(QWEN3_NEXT, 32), 32, 64)
    assert small.waste() > 0.5
    block_size = fit_block_size(QWEN3_NEXT, 32)
    assert block_size == 192
    shape = PoolShape(make_groups(QWEN3_NEXT, block_size), block_size, 64)
    assert shape.waste() < 0.1
    assert len(shape.groups) <= 16
    intervals = {group.spec.checkpoint_interval for group in shape.groups if isinstance(group.spec, RecurrentState)}
    # 36 states take the bytes of 3,200 tokens; a hit should recompute fewer.
    assert intervals == {960}
    assert 960 % block_size == 0


def test_checkpoints_of_small_states_are_not_closer_than_a_chunk() -> None:
    specs: list[CacheSpec] = [PagedKV(8, 64, 2) if layer % 3 == 2 else RecurrentState(12_288) for layer in range(15)]
    (interval,) = {
        group.spec.checkpoint_interval for group in make_groups(specs, 32) if isinstance(group.spec, RecurrentState)
    }
    assert interval == 256


def test_hit_of_a_state_needs_its_last_block_only() -> None:
    state = RecurrentState(8, 64)
    assert [state.table_len(n, 16) for n in (0, 1, 1000)] == [0, 1, 1]
    assert state.first_of_hit(128, 16) == 7
    assert FULL.first_of_hit(128, 16) == 0
    assert WINDOW.first_of_hit(160, 16) == (160 - 127) // 16
    assert state.held_blocks(640, 16) == 1 + 10
