import math

import pytest

from quire.drafts import drafting
from quire.drafts.drafting import Drafting, StepTimes
from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request, SequenceUpdate
from quire.types import Draft, RequestResult, RequestSpec, ScheduledRequest, SchedulerOutput, StepResult
from tests.engine.builders import make_config


class Fixed:
    """Proposes the same for each request, with the same probability for each token."""

    def __init__(self, probability: float, num_tokens: int = 8) -> None:
        self.draft = Draft(tuple(range(num_tokens)), (probability,) * num_tokens)

    def propose(self, request: Request, max_tokens: int) -> Draft:
        return Draft(self.draft.token_ids[:max_tokens], self.draft.probabilities[:max_tokens])

    def forget_finished(self) -> None:
        pass


def request(name: str = "a", max_tokens: int = 100) -> Request:
    spec = RequestSpec(name, [1, 2, 3], SamplingParams(), max_tokens=max_tokens)
    item = Request(spec, output_token_ids=[4])
    item.num_computed_tokens = 3
    return item


def step(
    num_drafts: int, num_yielded: int, of: Request | None = None, draft: Draft | None = None
) -> tuple[SchedulerOutput, StepResult, list[SequenceUpdate]]:
    made = request() if of is None else of
    name, drafts = made.request_id, tuple(range(num_drafts))
    item = ScheduledRequest(name, 3, 1 + num_drafts, 1 + num_drafts, (), (), None, drafts)
    result = RequestResult(name, tuple(range(num_yielded)), draft=draft)
    update = SequenceUpdate(made, result, result.token_ids, 3)
    return SchedulerOutput(1, (), (item,), (), (), ()), StepResult(1, (result,)), [update]


def drafting_with(probability: float, seconds: dict[int, float], max_rows: int = 64, num_tokens: int = 8) -> Drafting:
    made = Drafting(make_config(max_num_seqs=4))
    made.proposer = Fixed(probability, num_tokens)  # type: ignore[assignment]
    made._max_rows = max_rows
    for num_rows, duration_s in seconds.items():
        made._times.note(num_rows, duration_s)
    return made


def lengths(made: Drafting, *requests: Request) -> list[int]:
    made.give_drafts(requests)
    return [len(item.draft_token_ids) for item in requests]


def test_more_rows_never_seem_to_take_less_time() -> None:
    times = StepTimes()
    times.note(1, 0.5)
    times.note(2, 0.25)
    times.note(8, 1.0)
    assert [times.seconds(rows) for rows in (1, 2, 5, 8)] == [0.5, 0.5, 0.75, 1.0]


def test_whole_draft_is_verified_where_rows_cost_nothing() -> None:
    assert lengths(drafting_with(0.9, {1: 1.0, 9: 1.0}), request()) == [8]


def test_no_draft_is_verified_where_each_row_costs_as_much_as_a_step() -> None:
    assert lengths(drafting_with(0.99, {1: 1.0, 9: 9.0}), request()) == [0]


def test_draft_is_as_long_as_its_rows_pay() -> None:
    # With t = 1 + 0.2 k and s = (1 - p^(k+1)) / (1 - p), p = 0.8: s / t is largest at k = 3.
    rates = {k: (1 - 0.8 ** (k + 1)) / 0.2 / (1 + 0.2 * k) for k in range(9)}
    best = max(rates, key=rates.__getitem__)
    assert lengths(drafting_with(0.8, {1: 1.0, 9: 2.6}), request()) == [best]


def test_nothing_is_verified_before_any_step_was_measured_or_while_prompts_are_computed() -> None:
    assert lengths(drafting_with(0.9, {}), request()) == [0]
    prompt = request("b")
    prompt.num_computed_tokens = 1
    assert lengths(drafting_with(0.9, {1: 1.0, 9: 1.0}), request(), prompt) == [0, 0]


def test_rows_of_all_requests_stay_within_the_logits_and_requests_within_their_tokens() -> None:
    free = {1: 1.0, 100: 1.0}
    assert sum(lengths(drafting_with(0.9, free, max_rows=10), request("a"), request("b"))) == 8
    assert lengths(drafting_with(0.9, free), request("a", max_tokens=4), request("b", max_tokens=2)) == [2, 0]


def test_time_of_a_step_is_taken_between_measured_rows_and_assumed_beyond() -> None:
    times = StepTimes()
    assert times.seconds(4) == 0
    times.note(4, 2.0)
    assert times.seconds(2) == 2.0
    assert times.seconds(8) == 3.0, "twice the rows: half as much time again"
    assert times.seconds(8 + drafting.UNTRIED_ROWS + 1) == math.inf
    times.note(8, 4.0)
    assert times.seconds(6) == 3.0
    assert times.seconds(8) == 4.0
    times.note(8, 400.0)
    assert times.seconds(8) < 5.0, "one slow step is no measurement"


@pytest.mark.parametrize(("row_cost", "pays"), [(0.02, True), (0.125, False)])
def test_what_more_rows_cost_is_tried_with_many_requests_too(row_cost: float, pays: bool) -> None:
    made, requests = drafting_with(0.9, {8: 1.0}), [request(name) for name in "abcdefgh"]
    tried = [8]
    for _ in range(20):
        tried.append(8 + sum(lengths(made, *requests)))
        assert tried[-1] <= 2 * max(tried[:-1]) + drafting.UNTRIED_ROWS, "no step is much longer than those before"
        for _ in range(20):
            made._times.note(tried[-1], 1 + (tried[-1] - 8) * row_cost)
        for item in requests:
            item.draft_token_ids = ()
            item.output_token_ids.append(5)
            item.num_computed_tokens += 1
    assert tried[1] > 8
    assert any(rows > 8 for rows in tried[-drafting.COLD_TOKENS :]) == pays


def test_request_whose_drafts_are_right_gets_one_token_a_step_until_they_are_wrong() -> None:
    made, item = drafting_with(0.1, {1: 1.0}), request()
    made.give_drafts([item])
    assert not item.expects_drafts
    for _ in range(10):
        assert made.note_step(*step(4, 5, item), seconds=1.0, has_prompts=False) == {
            "num_drafts": 4,
            "num_accepted": 4,
            "drafts": ((4, 4),),
        }
    made.give_drafts([item])
    assert item.expects_drafts
    for _ in range(60):
        assert made.note_step(*step(4, 1, item), seconds=1.0, has_prompts=False) == {
            "num_drafts": 4,
            "num_accepted": 0,
            "drafts": ((4, 0),),
        }
    made.give_drafts([item])
    assert not item.expects_drafts


def test_request_without_drafts_is_asked_again_after_some_tokens() -> None:
    made, item = drafting_with(0.9, {1: 1.0, 9: 9.0}), request()
    asked = []
    found = made.proposer
    assert found is not None
    propose = found.propose
    found.propose = lambda item, most: (asked.append(item.num_tokens), propose(item, most))[1]  # type: ignore[method-assign]
    for _ in range(2 * drafting.COLD_TOKENS):
        made.give_drafts([item])
        item.output_token_ids.append(5)
        item.num_computed_tokens += 1
    assert asked == [4, 4 + drafting.COLD_TOKENS]
    made._times = StepTimes()
    for num_rows in (1, 9):
        made._times.note(num_rows, 1.0)  # now drafts pay
    for _ in range(3):
        made.give_drafts([item])
        assert item.draft_token_ids
        item.draft_token_ids = ()
        item.output_token_ids.append(5)
        item.num_computed_tokens += 1
    assert asked[2:] == [20, 21, 22]


def test_last_token_of_a_step_is_no_accepted_draft() -> None:
    made = drafting_with(0.5, {1: 1.0})
    assert made.note_step(*step(0, 8), seconds=1.0, has_prompts=False)["drafts"] == ()  # decode iterations
    assert made.note_step(*step(3, 2), seconds=1.0, has_prompts=False)["drafts"] == ((3, 1),)
    assert made.note_step(*step(3, 0), seconds=1.0, has_prompts=False)["drafts"] == ((3, 0),)  # it failed


def test_draft_of_the_executor_is_taken_where_more_tokens_are_expected_of_it() -> None:
    made = drafting_with(0.5, {1: 1.0, 9: 1.0})
    item = request()
    made.note_step(*step(0, 1, item, Draft((7, 8), (0.99, 0.99))), 1.0, has_prompts=False)
    made.give_drafts([item])
    assert item.draft_token_ids == (7, 8)


def test_draft_of_the_executor_gives_way_where_fewer_tokens_are_expected_of_it() -> None:
    made = drafting_with(0.9, {1: 1.0, 9: 1.0})
    item = request()
    made.note_step(*step(0, 1, item, Draft((7, 8), (0.1, 0.1))), 1.0, has_prompts=False)
    made.give_drafts([item])
    assert item.draft_token_ids == tuple(range(8))


def test_request_in_flight_gets_no_draft_and_stays_out_of_the_next_step_once_it_is_due() -> None:
    made, idle, due, cold = drafting_with(0.9, {1: 1.0, 9: 1.0}), request("a"), request("b"), request("c")
    due.num_in_flight = cold.num_in_flight = 1
    cold.drafting.asked_from = cold.num_tokens + 1
    made.give_drafts([idle, due, cold], overlaps=True)
    assert [len(item.draft_token_ids) for item in (idle, due, cold)] == [8, 0, 0]
    assert (due.expects_drafts, cold.expects_drafts) == (True, False)
