"""Block tables: allocation, windows, groups, and what is reported to the executor."""

import pytest

from quire.scheduler.blocks import BlockManager
from quire.scheduler.request import Request
from quire.types import NULL_BLOCK_ID
from tests.scheduler.builders import make_config, make_request
from tests.scheduler.integrity import check_blocks


def computed(blocks: BlockManager, request: Request, num_tokens: int) -> None:
    """Do a step's work: allocate, compute, register."""
    assert blocks.allocate(request, num_tokens) is not None
    request.num_computed_tokens += num_tokens
    blocks.register(request, request.num_computed_tokens)
    check_blocks(blocks, [request])


def admit(blocks: BlockManager, request: Request) -> int:
    hit = blocks.lookup.find(request)
    blocks.admit(request, hit)
    request.num_computed_tokens = hit.num_tokens
    check_blocks(blocks, [request])
    return hit.num_tokens


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_window_never_holds_more_than_its_peak(window: int, chunk: int) -> None:
    config = make_config(windows=(window,), max_num_batched_tokens=chunk, enable_prefix_caching=False)
    blocks = BlockManager(config)
    request = make_request("a", 60)
    admit(blocks, request)
    most = 0
    while request.num_computed_tokens < 60:
        computed(blocks, request, min(chunk, 60 - request.num_computed_tokens))
        most = max(most, 100 - blocks.num_free)
    assert most <= blocks.shape.peak_blocks(60)
    assert blocks.shape.peak_blocks(60) <= most + 1


def test_hit_is_what_all_groups_agree_on() -> None:
    blocks = BlockManager(make_config(windows=(None, 5)))
    first = make_request("first", 30)
    admit(blocks, first)
    computed(blocks, first, 30)
    full, window = (list(table) for table in first.blocks.tables)
    blocks.forget(first)
    second = make_request("second", first.prompt_token_ids)
    assert blocks.lookup.find(second).num_tokens == 28
    blocks.cache.forget(window[6])
    assert blocks.lookup.find(second).num_tokens == 24
    blocks.cache.forget(window[4])
    assert blocks.lookup.find(second).num_tokens == 24
    blocks.cache.forget(window[5])
    # Token 24 looks back at block 5 of the window group, token 20 at block 4, token 16 at block 3.
    assert blocks.lookup.find(second).num_tokens == 16
    blocks.cache.forget(full[2])
    assert blocks.lookup.find(second).num_tokens == 8
    assert blocks.lookup.find(second).tables == [full[:2], [NULL_BLOCK_ID, window[1]]]


def test_fits_counts_cached_blocks_that_would_leave_the_free_list() -> None:
    blocks = BlockManager(make_config(num_blocks=7))
    first = make_request("first", 12)
    admit(blocks, first)
    computed(blocks, first, 12)
    blocks.forget(first)
    # Six free blocks, three of them the hit itself: three more make 24 tokens, not 25.
    for length, fits in ((24, True), (25, False)):
        request = make_request(f"r{length}", first.prompt_token_ids + list(range(length - 12)))
        assert blocks.fits(request, blocks.lookup.find(request), 0) is fits
    request = make_request("r", first.prompt_token_ids + list(range(12)))
    assert not blocks.fits(request, blocks.lookup.find(request), 1)
