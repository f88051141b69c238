from quire.scheduler.step_plan import Share, StepPlan
from tests.scheduler.builders import make_config, make_request


def test_the_budget_is_spent_and_refunded() -> None:
    plan = StepPlan(make_config(max_num_batched_tokens=10))
    plan.add(Share(make_request("a"), 7, catches_up=False))
    assert plan.chunk_len(8) == 3
    plan.remove("a")
    assert (plan.budget, plan.shares, plan.num_preempted) == (10, {}, 1)
    plan.remove("not in this step")
    assert (plan.budget, plan.num_preempted) == (10, 2)


def test_the_threshold_cuts_chunks() -> None:
    plan = StepPlan(make_config(long_prefill_token_threshold=4))
    assert [plan.chunk_len(num_left) for num_left in (3, 4, 5, 500)] == [3, 4, 4, 4]


def test_partial_prompts_are_counted_and_long_ones_apart() -> None:
    plan = StepPlan(
        make_config(long_prefill_token_threshold=4, max_num_partial_prefills=2, max_long_partial_prefills=1)
    )
    short, long = make_request("s", 4), make_request("l", 5)
    assert plan.allows_partial()
    plan.add_partial(long, 3)
    assert plan.allows_partial()
    assert not plan.allows_long_partial(long)
    assert plan.allows_long_partial(short)
    plan.add_partial(short, 2)
    assert not plan.allows_partial()
    assert plan.num_reserved_blocks == 5


def test_without_chunked_prefill_nothing_is_partial() -> None:
    assert not StepPlan(make_config(enable_chunked_prefill=False)).allows_partial()
