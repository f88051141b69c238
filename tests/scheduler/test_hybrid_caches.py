"""Checkpoints of recurrent states, by hand. `test_random_workloads.py` runs hybrid models at random."""

from collections.abc import Sequence

import pytest

from quire import cache_spec
from quire.cache_spec import CacheGroup, PagedKV, RecurrentState
from quire.config import SchedulerConfig
from quire.scheduler.blocks import BlockManager
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.transfers import Transfer
from quire.types import RequestResult, StepResult
from tests.scheduler.builders import make_config, make_request
from tests.scheduler.integrity import check_blocks

STATE = RecurrentState(8, checkpoint_interval=8)
STATE_AND_FULL = (CacheGroup((0,), PagedKV(1, 1, 1)), CacheGroup((1,), STATE))


def started(config: SchedulerConfig, num_tokens: int) -> tuple[BlockManager, Request]:
    blocks, request = BlockManager(config), make_request("a", num_tokens)
    blocks.admit(request, blocks.lookup.find(request))
    return blocks, request


def compute(
    blocks: BlockManager, request: Request, num_tokens: int, others: Sequence[Request] = ()
) -> tuple[Transfer, ...]:
    transfers = blocks.allocate(request, num_tokens)
    assert transfers is not None
    request.num_computed_tokens += num_tokens
    blocks.register(request, request.num_computed_tokens)
    check_blocks(blocks, [request, *others])
    return transfers


def test_checkpoint_is_the_page_that_the_next_step_leaves() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), 20)
    assert blocks.checkpoints.chunk_limit(request, 20) == 8
    assert compute(blocks, request, 8) == ()
    state = request.blocks.tables[1][0]
    assert blocks.checkpoints.chunk_limit(request, 12) == 8
    (transfer,) = compute(blocks, request, 4)
    assert (transfer.source_ids, transfer.target_ids) == ((state,), tuple(request.blocks.tables[1]))
    assert compute(blocks, request, 4) == ()
    # The hit ends at the checkpoint, not at the 16 tokens of full attention: those have no checkpoint yet.
    other = make_request("b", request.prompt_token_ids)
    assert blocks.lookup.find(other).num_tokens == 8
    assert blocks.lookup.find(other).tables[1] == [state]


def test_hit_continues_in_a_copy_of_the_checkpoint() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), 20)
    for num_tokens in (8, 8, 4):
        compute(blocks, request, num_tokens)
    blocks.forget(request)
    others = [make_request(name, request.prompt_token_ids) for name in "bc"]
    for other in others:
        hit = blocks.lookup.find(other)
        assert hit.num_tokens == 16
        (checkpoint,) = hit.tables[1]
        other.num_computed_tokens = 16
        blocks.admit(other, hit)
        beside = [each for each in others if each is not other]
        (transfer,) = [item for item in compute(blocks, other, 4, beside) if item.group_index == 1]
        assert transfer.source_ids == (checkpoint,)
        assert other.blocks.tables[1] == list(transfer.target_ids) != [checkpoint]


def test_hit_fits_only_if_the_copy_of_its_checkpoint_does() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL, num_blocks=7), 12)
    compute(blocks, request, 8)
    compute(blocks, request, 1)
    blocks.forget(request)
    # Of six pages two hold the blocks of the hit and one its checkpoint.
    for num_tokens, fits in ((16, True), (17, False)):
        other = make_request("b", request.prompt_token_ids[:9] + [1] * (num_tokens - 9))
        assert blocks.lookup.find(other).num_tokens == 8
        assert blocks.fits(other, blocks.lookup.find(other), 0) is fits


@pytest.mark.parametrize(("num_tokens", "last"), [(15, 12), (16, 16), (17, 16), (12, 8), (7, 4)])
def test_prompt_has_a_checkpoint_at_its_last_full_block_if_the_interval_leaves_much_behind_it(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, last: int
) -> None:
    monkeypatch.setattr(cache_spec, "CHECKPOINT_INTERVALS", (4, 8))
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), num_tokens)
    while (num_left := request.num_uncomputed_tokens) > 0:
        compute(blocks, request, blocks.checkpoints.chunk_limit(request, num_left))
    request.output_token_ids += [1, 2]
    compute(blocks, request, 1)
    turn = make_request("b", [*request.prompt_token_ids, *range(20)])
    assert blocks.lookup.find(turn).num_tokens == last
    blocks.forget(request)
    blocks.admit(turn, blocks.lookup.find(turn))
    turn.num_computed_tokens = last
    assert compute(blocks, turn, blocks.checkpoints.chunk_limit(turn, turn.num_uncomputed_tokens))
    blocks.forget(turn)
    assert blocks.reset_prefix_cache()


def test_prompt_has_no_second_checkpoint_close_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_spec, "CHECKPOINT_INTERVALS", (5, 8))
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), 15)
    compute(blocks, request, 8)
    assert blocks.checkpoints.chunk_limit(request, 7) == 7


def test_decodes_do_not_step_past_a_checkpoint() -> None:
    config = make_config(kv_cache_groups=STATE_AND_FULL, multi_step_decode=6)
    scheduler = Scheduler(config)
    scheduler.add_request(make_request("a", 5, max_tokens=40))
    ends = []
    for _ in range(6):
        output = scheduler.schedule()
        (item,) = output.scheduled
        new = RequestResult("a", tuple(range(item.max_new_tokens)))
        scheduler.update(output, StepResult(output.step_id, (new,)))
        ends.append(item.num_computed_tokens + item.num_tokens + item.max_new_tokens - 1)
    assert ends == [5, 8, 14, 16, 22, 24]
    turn = make_request("b", [*scheduler.requests.by_id["a"].token_slice(0, 24), 1])
    assert scheduler.blocks.lookup.find(turn).num_tokens == 16


def test_pool_without_a_spare_page_makes_no_checkpoint() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL, num_blocks=5), 12)
    compute(blocks, request, 8)
    assert compute(blocks, request, 4) == ()
    assert blocks.num_free == 0


def test_prompts_that_may_not_be_split_have_no_checkpoints() -> None:
    config = make_config(kv_cache_groups=STATE_AND_FULL, enable_chunked_prefill=False, max_num_batched_tokens=256)
    blocks, request = started(config, 20)
    assert blocks.checkpoints.chunk_limit(request, 20) == 20


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_state_returns_to_before_the_step_unless_all_drafts_are_accepted(num_accepted: int) -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), 6)
    compute(blocks, request, 5)
    before = request.blocks.tables[1][0]
    assert blocks.allocate(request, 3, num_drafts=2) is not None
    assert request.blocks.tables[1][0] != before
    computed = blocks.truncate(request, 6 + num_accepted)
    assert computed == (8 if num_accepted == 2 else 5)
    assert (request.blocks.tables[1][0] == before) == (num_accepted < 2)
    request.num_computed_tokens = computed
    blocks.register(request, computed)
    check_blocks(blocks, [request])
    blocks.forget(request)
    assert blocks.reset_prefix_cache()


def test_truncation_behind_cached_tokens_is_refused() -> None:
    blocks, request = started(make_config(), 12)
    compute(blocks, request, 9)
    with pytest.raises(AssertionError, match="are cached"):
        blocks.truncate(request, 7)
    blocks, request = started(make_config(windows=(3,), enable_prefix_caching=False), 12)
    compute(blocks, request, 9)
    compute(blocks, request, 1)
    with pytest.raises(AssertionError, match="a window moved on"):
        blocks.truncate(request, 2)


def test_failed_request_leaves_no_checkpoint() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), 20)
    for num_tokens in (8, 8, 4):
        compute(blocks, request, num_tokens)
    blocks.forget_prefixes(request)
    blocks.forget(request)
    assert blocks.lookup.find(make_request("b", request.prompt_token_ids)).num_tokens == 0
    assert len(blocks.cache) == 0
