import pytest

from quire.errors import EngineError
from quire.scheduler.block_pool import BlockPool


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_usable) == (0, 4)
    with pytest.raises(EngineError, match="1 KV blocks taken from a free list of 0"):
        pool.take(1)


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(5)
    (block_id,) = pool.take(1)
    pool.share(block_id)
    pool.release(block_id, holds_prefix=False)
    assert pool.num_free == 3
    pool.release(block_id, holds_prefix=False)
    assert pool.num_free == 4
    with pytest.raises(EngineError, match="released more often"):
        pool.release(block_id, holds_prefix=False)


def test_useless_content_is_reused_first_and_cached_prefixes_least_recently_used_first() -> None:
    pool = BlockPool(6)
    first, second, third, fourth, fifth = pool.take(5)
    pool.release(second, holds_prefix=True)
    pool.release(first, holds_prefix=True)
    pool.release(third, holds_prefix=False)
    pool.release(fourth, holds_prefix=False)
    pool.share(second)
    pool.release(second, holds_prefix=True)
    assert pool.free_ids() == [fourth, third, first, second]
    pool.release(fifth, holds_prefix=True)
    assert pool.take(5) == [fourth, third, first, second, fifth]


def test_sharing_a_free_block_takes_it_out_of_the_free_list() -> None:
    pool = BlockPool(4)
    pool.share(2)
    assert pool.free_ids() == [1, 3]
    assert pool.reference_counts == [0, 0, 1, 0]
