from typing import Any

import pytest

from quire.errors import EngineError
from quire.events import EventKind, EventLog
from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.types import SchedulerOutput, StepResult
from tests.scheduler.builders import VOCAB_SIZE, Driver, make_config, make_request, run_alone


def test_published_example_step_by_step() -> None:
    driver = Driver(make_config(max_num_batched_tokens=2048, max_model_len=8192, block_size=16, num_blocks=1000))
    driver.add(make_request("C", 10, 50))
    driver.step()
    driver.add(make_request("A", 5000, 5), make_request("B", 500, 5))
    assert driver.shares() == {"C": 1, "A": 2047}
    assert driver.shares() == {"C": 1, "A": 2047}
    assert [item.max_new_tokens for item in driver.outputs[-1].scheduled] == [1, 0]
    assert driver.shares() == {"C": 1, "A": 906, "B": 500}
    assert all(item.max_new_tokens for item in driver.outputs[-1].scheduled)
    assert driver.shares() == {"C": 1, "A": 1, "B": 1}


def test_without_chunked_prefill_prompts_run_whole() -> None:
    driver = Driver(make_config(enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64))
    driver.add(make_request("a", 40), make_request("b", 40))
    assert driver.shares() == {"a": 40}
    assert driver.shares() == {"a": 1, "b": 40}


def test_threshold_cuts_long_prompts_only() -> None:
    driver = Driver(make_config(long_prefill_token_threshold=10))
    driver.add(make_request("long", 25), make_request("short", 10))
    assert driver.shares() == {"long": 10, "short": 10}
    assert driver.shares() == {"long": 10, "short": 1}
    assert driver.shares() == {"long": 5, "short": 1}
    assert driver.shares() == {"long": 1, "short": 1}


def test_max_num_partial_prefills() -> None:
    for limit, expected in ((1, {"a": 10}), (2, {"a": 10, "b": 10}), (3, {"a": 10, "b": 10, "c": 10})):
        driver = Driver(
            make_config(
                long_prefill_token_threshold=10, max_num_partial_prefills=limit, max_long_partial_prefills=limit
            )
        )
        driver.add(*(make_request(name, 25) for name in "abc"))
        assert driver.shares() == expected


def test_short_prompts_overtake_long_ones_that_wait_for_their_turn() -> None:
    driver = Driver(make_config(long_prefill_token_threshold=10, max_num_partial_prefills=3))
    driver.add(make_request("long", 25), make_request("later", 25), make_request("short", 5))
    assert driver.shares() == {"long": 10, "short": 5}
    assert driver.shares() == {"long": 10, "short": 1}
    assert driver.shares() == {"long": 5, "short": 1, "later": 10}


def test_big_request_is_not_overtaken_for_blocks() -> None:
    driver = Driver(make_config(num_blocks=11, block_size=4))
    driver.add(make_request("a", 20, 8))
    driver.step()
    driver.add(make_request("big", 32, 4), make_request("small", 4, 4))
    assert driver.shares() == {"a": 1}
    driver.run()
    first_seen = {}
    for output in driver.outputs:
        for item in output.scheduled:
            first_seen.setdefault(item.request_id, output.step_id)
    assert first_seen["a"] < first_seen["big"] <= first_seen["small"]


def test_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    # 10 blocks: "a" computes 16 of its 32 tokens a step, and the blocks of the rest are promised to it.
    driver = Driver(make_config(num_blocks=11, max_num_batched_tokens=24, max_num_partial_prefills=4))
    driver.add(make_request("c", 4, 30))
    driver.step()
    driver.add(make_request("a", 30, 1), make_request("b", 12, 1))
    assert driver.shares() == {"c": 1, "a": 23}
    assert driver.shares() == {"c": 1, "a": 7}
    assert driver.shares() == {"c": 1, "b": 12}
    assert sum(len(output.preempted_ids) for output in driver.outputs) == 0


def test_no_request_is_admitted_in_a_step_that_preempts() -> None:
    def run(short_at: int | None) -> list[SchedulerOutput]:
        driver = Driver(make_config(num_blocks=9, policy="sjf"))
        driver.add(make_request("a", 8, 16), make_request("b", 8, 16))
        while driver.scheduler.has_unfinished:
            if len(driver.outputs) == short_at:
                driver.add(make_request("short", 2, 2))
            driver.step()
        return driver.outputs

    at = next(at for at, output in enumerate(run(None)) if output.preempted_ids)
    # The victim's blocks would do for "short", which comes before the victim in this policy.
    outputs = run(at)
    assert outputs[at].preempted_ids == ("b",)
    assert outputs[at].new_requests == ()
    assert [new.request_id for new in outputs[at + 1].new_requests] == ["short"]


def test_schedule_and_update_alternate() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add_request(make_request("a"))
    output = scheduler.schedule()
    with pytest.raises(EngineError, match="before update"):
        scheduler.schedule()
    with pytest.raises(EngineError, match="step"):
        scheduler.update(output, StepResult(output.step_id + 1, ()))
    with pytest.raises(EngineError, match="no token was sampled"):
        scheduler.update(output, StepResult(output.step_id, ()))
    scheduler.abort(["a"])
    assert scheduler.schedule().scheduled == ()


def test_events_tell_the_story() -> None:
    config = make_config(num_blocks=9, max_num_batched_tokens=8)
    events = EventLog()
    driver = Driver(config, Scheduler(config, events))
    driver.add(make_request("a", 10, 12, n=2), make_request("b", 12, 12))
    driver.run()
    others = {EventKind.OFFLOAD, EventKind.FETCH, EventKind.FETCHED, EventKind.RELEASE, EventKind.DISK}
    others |= {EventKind.STEP, EventKind.LOST, EventKind.OPS}
    assert {event.kind for event in events} == set(EventKind) - others
    finished = events.of(EventKind.FINISH)
    assert sorted(event.request_id for event in finished) == ["a", "a.1", "b"]
    assert all(event.data == {"reason": "length", "num_output_tokens": 12} for event in finished)
    steps = events.of(EventKind.SCHEDULE)
    assert [event.data["num_tokens"] for event in steps] == [output.num_tokens for output in driver.outputs]


def run_multi_step(most: int, *requests: Request, **config: Any) -> Driver:
    """Run to the end; every step has as many decode iterations as it may."""
    driver = Driver(make_config(multi_step_decode=most, **config))
    driver.executor.num_iterations = lambda most: most
    driver.add(*requests)
    driver.run()
    return driver


def test_one_token_a_step_while_a_waiting_request_lacks_blocks() -> None:
    driver = run_multi_step(2, make_request("a", 8, 9), make_request("b", 8, 9), num_blocks=6, max_num_seqs=2)
    assert [most for name, most in most_tokens_of_first(driver) if name == "a"] == [1] * 9
    assert ("b", 2) in most_tokens_of_first(driver)


def test_multi_step_decode_while_max_num_seqs_run_and_next_request_starts_at_once() -> None:
    driver = run_multi_step(4, make_request("a", 8, 9), make_request("b", 8, 9), max_num_seqs=1)
    each = [1, 4, 4]
    assert most_tokens_of_first(driver) == [("a", number) for number in each] + [("b", number) for number in each]


def most_tokens_of_first(driver: Driver) -> list[tuple[str, int]]:
    """Return, for each step that computed something, its first request and the most tokens it may yield."""
    return [
        (output.scheduled[0].request_id, output.scheduled[0].max_new_tokens)
        for output in driver.outputs
        if output.scheduled
    ]


# --- Drafts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_right", range(5))
def test_rejected_drafts_give_back_their_blocks_and_are_never_cached(num_right: int) -> None:
    driver = Driver(make_config(block_size=2))
    request = make_request("a", 5, 20)
    expected = run_alone(request, 256)
    driver.add(request)
    driver.step()
    wrong = [(token_id + 1) % VOCAB_SIZE for token_id in expected[1 + num_right : 7]]
    request.draft_token_ids = tuple(expected[1 : 1 + num_right] + wrong)
    (update,) = driver.step()
    assert driver.outputs[-1].scheduled[0].max_new_tokens == 7
    assert list(update.new_token_ids) == expected[1 : 2 + num_right]
    assert request.draft_token_ids == ()
    assert request.num_computed_tokens == 5 + 1 + num_right == update.num_computed_tokens
    assert len(request.blocks.tables[0]) == -(-request.num_computed_tokens // 2)
    assert len(driver.scheduler.blocks.cache) == request.num_computed_tokens // 2
    driver.run()
    assert request.output_token_ids == expected
    assert driver.all_blocks_are_home


def test_drafts_preempt_no_request_and_leave_tokens_to_other_decodes() -> None:
    driver = Driver(make_config(num_blocks=9, max_num_batched_tokens=16))
    requests = [make_request(name, 7, 6, seed=index) for index, name in enumerate("abc")]
    driver.add(*requests)
    while driver.scheduler.has_unfinished:
        for request in requests:
            request.draft_token_ids = tuple(run_alone(request, 256)[len(request.output_token_ids) :])
        driver.step()
        drafts = [item.draft_token_ids for item in driver.outputs[-1].scheduled]
        assert not (driver.outputs[-1].preempted_ids and any(drafts))
    assert any(item.draft_token_ids for output in driver.outputs for item in output.scheduled)
    assert [request.output_token_ids for request in requests] == [run_alone(request, 256) for request in requests]


def test_new_request_comes_whole_and_its_own_tokens_are_not_sent_back() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    request = make_request("a", 10, 3, seed=9, eos_token_ids=frozenset({5, 3}), bad_words_token_ids=((1, 2),))
    request.sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    driver.add(request)
    driver.run()
    (new,) = driver.outputs[0].new_requests
    assert new.token_ids == tuple(request.prompt_token_ids)
    assert (new.num_prompt_tokens, new.seed, new.eos_token_ids) == (10, 9, (3, 5))
    assert (new.sampling, new.bad_words_token_ids) == (request.sampling, ((1, 2),))
    assert (new.max_tokens, new.awaits_external_token) == (3, False)
    assert {item.new_token_ids for output in driver.outputs for item in output.scheduled} == {()}
