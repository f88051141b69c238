"""How `paged_attention/plan.py` groups decodes, shares plans between layers and bounds memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.paged_attention import batched, plan
from quire.kernels.paged_attention.cases import MIXED, make_arguments

BYTES = 4096


@given(st.lists(st.integers(1, 5000), max_size=40))
def test_buckets_hold_each_request_once_within_their_bounds(lengths: list[int]) -> None:
    limit = 32 << 20
    buckets = plan.choose_buckets(lengths, BYTES, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        used = sum(lengths[index] for index in bucket)
        padded = len(bucket) * max(lengths[index] for index in bucket)
        allowed = max(plan.MAX_PADDING_BYTES, plan.MAX_PADDING_SHARE * used * BYTES)
        assert (padded - used) * BYTES <= allowed
        assert len(bucket) == 1 or padded * BYTES <= limit


def test_equal_lengths_share_one_bucket() -> None:
    assert plan.choose_buckets([200] * 32, 768, 16 << 20) == [list(range(32))]


def test_layers_share_one_plan_and_other_windows_have_their_own() -> None:
    arguments = make_arguments(MIXED)
    step = arguments["step"]
    batched.paged_attention(**arguments)
    (first,) = step.derived.values()
    batched.paged_attention(**arguments)
    assert list(step.derived.values()) == [first]
    batched.paged_attention(**{**arguments, "window": 3})
    assert len(step.derived) == 2


def test_masks_of_a_long_prompt_take_memory_in_proportion_to_its_length() -> None:
    arguments = make_arguments([(1500, 0)], heads=1, kv_heads=1, head_size=16)
    batched.paged_attention(**arguments)
    (made,) = arguments["step"].derived.values()
    (prefill,) = made.prefills
    storages = {tile.mask.untyped_storage().data_ptr(): tile.mask.untyped_storage().nbytes() for tile in prefill.tiles}
    assert len(prefill.tiles) == 6
    assert sum(storages.values()) <= 4 * plan.QUERY_TILE * (1500 + plan.QUERY_TILE)


def test_a_window_limits_the_keys_that_are_gathered() -> None:
    arguments = make_arguments([(1, 400), (8, 300)], window=20)
    batched.paged_attention(**arguments)
    (made,) = arguments["step"].derived.values()
    assert made.decodes[0].length == 20
    assert made.prefills[0].rows.numel() == 2 * (19 + 8)


def test_plans_hold_no_keys() -> None:
    """A second step may reuse the memory: rows are indices, so new contents are seen."""
    arguments = make_arguments(MIXED)
    before = batched.paged_attention(**arguments)
    arguments["kv_cache"].mul_(0.0).nan_to_num_(nan=0.0)
    after = batched.paged_attention(**arguments)
    assert before.abs().max() > 0
    assert torch.equal(after, torch.zeros_like(after))
