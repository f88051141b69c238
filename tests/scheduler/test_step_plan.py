from typing import Any

import pytest

from quire.scheduler.request import Request
from quire.scheduler.step_plan import StepPlan, StepShare
from tests.scheduler.builders import Driver, make_config, make_pooling_request, make_request


def running(num_left: int) -> Request:
    request = make_request(f"with {num_left} left", 100)
    request.num_computed_tokens = 100 - num_left
    return request


@pytest.mark.parametrize(("num_decodes", "expected"), [(0, 500), (1, 11), (2, 10), (4, 12), (100, 300)])
def test_prompts_get_a_share_of_a_step_with_decodes(num_decodes: int, expected: int) -> None:
    plan = StepPlan(make_config(max_num_batched_tokens=512, prefill_tokens_per_decode=3))
    plan.limit_prefill([running(1)] * num_decodes + [running(70)])
    assert plan.chunk_len(500) == expected
    assert plan.chunk_len(1) == 1


@pytest.mark.parametrize(("num_decodes", "expected"), [(0, 500), (1, 59), (20, 60), (50, 150)])
def test_step_tokens_are_the_smallest_budget_of_a_throttled_step(num_decodes: int, expected: int) -> None:
    plan = StepPlan(make_config(max_num_batched_tokens=512, prefill_tokens_per_decode=3))
    plan.limit_prefill([running(1)] * num_decodes, step_tokens=60)
    assert plan.chunk_len(500) == expected


@pytest.mark.parametrize(
    ("num_prompts", "num_startable", "expected"),
    [(1, 0, 100), (0, 3, 100), (1, 5, 200), (5, 6, 400), (20, 100, 800)],
)
def test_budget_grows_with_the_requests_that_wait_per_decode(
    num_prompts: int, num_startable: int, expected: int
) -> None:
    plan = StepPlan(make_config(max_num_batched_tokens=1024, prefill_tokens_per_decode=3))
    plan.limit_prefill([running(1)] * 20 + [running(70)] * num_prompts, 100, num_startable)
    assert plan.chunk_len(1000) == expected - 20


def test_all_prompts_share_the_prefill_budget_and_decodes_do_not() -> None:
    plan = StepPlan(make_config(max_num_batched_tokens=512, prefill_tokens_per_decode=3))
    plan.limit_prefill([running(1)])
    plan.add(StepShare(make_request("a"), 1, catches_up=True))
    plan.add(StepShare(removed := make_request("b"), 5, catches_up=False))
    assert (plan.chunk_len(100), plan.chunk_len(1)) == (6, 1)
    plan.add(StepShare(make_request("c"), 6, catches_up=False))
    assert (plan.chunk_len(100), plan.chunk_len(1)) == (0, 1)
    plan.remove(removed)
    assert plan.chunk_len(100) == 5


def generating(request_id: str = "g", max_tokens: int = 20, num_output: int = 1, **fields: Any) -> Request:
    request = make_request(request_id, 8, max_tokens, **fields)
    request.output_token_ids = [7] * num_output
    request.num_computed_tokens = request.num_tokens - 1
    return request


def most_tokens(*running: Request, num_free_blocks: int = 100, **config: Any) -> int:
    plan = StepPlan(make_config(**{"multi_step_decode": 6, **config}))
    plan.allow_lookahead(running, num_free_blocks)
    return 1 + plan.num_lookahead_tokens


def test_decodes_look_ahead_up_to_the_first_end() -> None:
    assert most_tokens(generating()) == 6
    assert most_tokens(generating(), generating(num_output=15)) == 5
    assert most_tokens(generating(), generating(num_output=19)) == 1
    assert most_tokens(generating(), multi_step_decode=1) == 1
    assert most_tokens() == 1


def test_no_lookahead_beside_prompt_beam_vector_stop_string_drafts_or_step_in_flight() -> None:
    beam = generating(awaits_external_token=True)
    vector = make_pooling_request("v")
    stop_string = generating(params={"stop": "end"})
    drafted, in_flight = generating(draft_token_ids=(1,)), generating(num_in_flight=1)
    for other in (running(2), make_request("first token", 1), beam, vector, stop_string, drafted, in_flight):
        assert most_tokens(generating(), other) == 1


def test_lookahead_takes_free_blocks_only() -> None:
    # 6 tokens may begin two blocks of 4 tokens, and copy one that is shared.
    assert most_tokens(generating(), num_free_blocks=3) == 6
    assert most_tokens(generating(), num_free_blocks=2) == 1
    assert most_tokens(generating(), generating(), num_free_blocks=5) == 1
    assert most_tokens(generating(), num_free_blocks=5, windows=(None, 9)) == 1


def test_stages_share_the_decodes_and_prompts_go_on() -> None:
    plan = StepPlan(make_config(pipeline_stages=2))
    decodes = [generating(f"g{index}") for index in range(5)]
    decodes[0].num_computed_tokens += 1  # in flight: its token is not known
    prompt = running(20)
    assert plan.may_compute([prompt, *decodes]) == (prompt, *decodes[:4])
    assert StepPlan(make_config()).may_compute([prompt, *decodes]) == (prompt, *decodes)


@pytest.mark.parametrize(
    ("params", "fields", "expected"),
    [
        ({}, {}, True),
        ({"temperature": 0.7, "top_p": 0.9, "stop": "end", "min_tokens": 2}, {}, True),
        ({"repetition_penalty": 1.2}, {}, False),
        ({"bad_words": ["a"]}, {}, False),
        ({"logprobs": 1}, {}, False),
        ({"mirostat": 2}, {}, False),
        ({}, {"awaits_external_token": True}, False),
        ({}, {"expects_drafts": True}, False),
    ],
)
def test_request_runs_ahead_if_its_token_is_chosen_from_the_logits_alone(
    params: dict[str, Any], fields: dict[str, Any], expected: bool
) -> None:
    driver = Driver(make_config(max_in_flight=2))
    driver.add(make_request("a", 8, 5, params=params, **fields))
    assert [item.num_tokens for item in driver.submit().scheduled] == [8]
    assert [item.num_computed_tokens for item in driver.submit().scheduled] == [8] * expected


def test_stages_of_a_pipeline_wait_for_each_token() -> None:
    driver = Driver(make_config(max_in_flight=2, pipeline_stages=2))
    driver.add(make_request("a", 8, 5))
    assert [len(driver.submit().scheduled) for _ in range(2)] == [1, 0]
