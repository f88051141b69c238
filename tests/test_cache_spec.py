"""How many blocks a sequence needs at most; `scheduler/test_blocks.py` holds it against what is really handed out."""

import pytest

from quire.cache_spec import CacheGroup, PagedKV, PoolShape

FULL = PagedKV(num_kv_heads=2, head_size=8, dtype_bytes=2)
WINDOW = PagedKV(num_kv_heads=1, head_size=8, dtype_bytes=2, window=128)


def test_sliding_window_needs_only_window_and_chunk() -> None:
    shape = PoolShape((CacheGroup((0,), WINDOW),), block_size=16, max_num_batched_tokens=64)
    assert shape.peak_blocks(16) == 1
    assert shape.peak_blocks(10_000) == shape.peak_blocks(20_000) == 13
    assert shape.longest_sequence(13, 20_000) == 20_000
    assert shape.longest_sequence(12, 20_000) == 12 * 16


def test_groups_add_up() -> None:
    shape = PoolShape((CacheGroup((0, 2), FULL), CacheGroup((1,), WINDOW)), 16, 64)
    assert shape.peak_blocks(10_000) == 625 + 13
    assert shape.block_bytes == 16 * 2 * FULL.bytes_per_token


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("chunk", [1, 2, 16, 33])
def test_the_peak_of_a_window_is_the_most_over_all_alignments(window: int, chunk: int) -> None:
    block_size = 16
    shape = PoolShape((CacheGroup((0,), PagedKV(1, 8, 2, window)),), block_size, chunk)
    needed = [
        (start + chunk - 1) // block_size - max(0, start - window + 1) // block_size + 1
        for start in range(200, 200 + block_size)
    ]
    assert shape.window_peak(window) == max(needed)


def test_nothing_fits_in_no_blocks() -> None:
    assert PoolShape((CacheGroup((0,), FULL),), 16, 64).longest_sequence(0, 100) == 0
