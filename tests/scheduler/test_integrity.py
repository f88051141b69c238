"""Audit of blocks: each kind of damage is found."""

from collections.abc import Callable

import pytest

from quire.cache_spec import CacheGroup, RecurrentState
from quire.scheduler.blocks import BlockManager
from tests.scheduler.builders import make_config, make_groups, make_request
from tests.scheduler.integrity import check_blocks


def busy_manager() -> BlockManager:
    groups = (*make_groups((None, 5)), CacheGroup((2,), RecurrentState(8, 16)))
    blocks = BlockManager(make_config(kv_cache_groups=groups))
    for name in "ab":
        request = make_request(name, 20)
        blocks.admit(request, blocks.find_prefix(request))
        assert blocks.allocate(request, 16) is not None
        request.num_computed_tokens = 16
        blocks.register(request, request.num_computed_tokens)
        assert blocks.allocate(request, 4) is not None  # in a copy of the state
    blocks.forget("b")
    return blocks


def lose_a_block(blocks: BlockManager) -> None:
    blocks.owned["a"].tables[0].pop()


def share_without_counting(blocks: BlockManager) -> None:
    blocks.owned["a"].tables[0][-1] = blocks.owned["a"].tables[1][-1]


def own_a_free_block(blocks: BlockManager) -> None:
    blocks.owned["a"].tables[0][1] = blocks.pool.free_ids()[0]


def release_twice(blocks: BlockManager) -> None:
    blocks.pool.release(blocks.owned["a"].tables[0][0], holds_prefix=False)


def take_for_nobody(blocks: BlockManager) -> None:
    blocks.pool.take(1)


def punch_a_hole(blocks: BlockManager) -> None:
    block_id = blocks.owned["a"].tables[0][2]
    blocks.pool.release(block_id, holds_prefix=True)
    blocks.owned["a"].tables[0][2] = 0


def repeat_a_block(blocks: BlockManager) -> None:
    table = blocks.owned["a"].tables[0]
    blocks.pool.share(table[0])
    blocks.pool.release(table[1], holds_prefix=True)
    table[1] = table[0]


def use_a_block_in_two_groups(blocks: BlockManager) -> None:
    table, other, _ = blocks.owned["a"].tables
    blocks.pool.share(table[0])
    blocks.pool.release(other[-1], holds_prefix=True)
    other[-1] = table[0]


def cache_a_block_for_another_group(blocks: BlockManager) -> None:
    table = blocks.owned["a"].tables[0]
    blocks.cache.forget(table[0])
    blocks.cache.register(1, b"digest", b"content", table[0])


def keep_two_states(blocks: BlockManager) -> None:
    blocks.owned["a"].tables[2] += blocks.pool.take(1)


def lose_a_kept_state(blocks: BlockManager) -> None:
    blocks.owned["a"].kept_states.clear()


def misfile_a_prefix(blocks: BlockManager) -> None:
    key = next(iter(blocks.cache._block_ids))
    blocks.cache._block_ids[key] += 1


DAMAGE: list[tuple[Callable[[BlockManager], None], str]] = [
    (lose_a_block, "has 1 references and 0 owners"),
    (share_without_counting, "has 1 references and 2 owners"),
    (own_a_free_block, "is free and owned"),
    (release_twice, "has 0 references and 1 owners"),
    (take_for_nobody, "referenced blocks are not 100"),
    (punch_a_hole, "null blocks are not the first 0"),
    (repeat_a_block, "a block stands twice"),
    (use_a_block_in_two_groups, r"is used by groups \[0, 1\]"),
    (cache_a_block_for_another_group, r"is used by groups \[0, 1\]"),
    (keep_two_states, "more than one state"),
    (lose_a_kept_state, "has 1 references and 0 owners"),
    (misfile_a_prefix, "is found as"),
]


def test_manager_without_damage_passes() -> None:
    check_blocks(busy_manager())


def test_detached_blocks_count_as_owned() -> None:
    blocks = busy_manager()
    owned = blocks.detach("a")
    with pytest.raises(AssertionError, match="references and 0 owners"):
        check_blocks(blocks)
    check_blocks(blocks, [owned])
    blocks.release(owned)
    assert blocks.reset_prefix_cache()


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_damage_is_found(damage: Callable[[BlockManager], None], message: str) -> None:
    blocks = busy_manager()
    damage(blocks)
    with pytest.raises(AssertionError, match=message):
        check_blocks(blocks)
