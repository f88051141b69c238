from quire.drafts.executor_drafts import EXPLORE_STEPS, EXPLORED_GUESSES, MAX_GUESSES, ExecutorDrafts
from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request, SequenceUpdate
from quire.types import Draft, RequestResult, RequestSpec, ScheduledRequest, SchedulerOutput, StepResult

DRAFT = Draft((1, 2, 3, 4), (0.95,) * 4)


def output(num_guesses: int = 4) -> SchedulerOutput:
    item = ScheduledRequest("a", 3, 1, 1, (), ())
    return SchedulerOutput(1, (), (item,), (), (), (), num_draft_tokens=num_guesses)


def request(name: str = "a") -> Request:
    return Request(RequestSpec(name, [1, 2, 3], SamplingParams(temperature=0)), output_token_ids=[4])


def note(
    made: ExecutorDrafts,
    item: Request,
    *token_ids: int,
    num_guesses: int = 4,
    draft: Draft | None = DRAFT,
    draft_s: float = 0.4,
) -> None:
    result = RequestResult("a", token_ids, draft=draft)
    step, updates = StepResult(1, (result,), draft_s=draft_s), [SequenceUpdate(item, result, token_ids, 3)]
    made.note(output(num_guesses), step, updates, has_prompts=False)


def guessed(*token_ids: int, num_steps: int = 100, draft_s: float = 0.4) -> tuple[ExecutorDrafts, Request]:
    """Drafts whose guesses 1, 2, 3, 4 were followed by these tokens in each step, and the request."""
    made, item = ExecutorDrafts(), request()
    for _ in range(num_steps):
        note(made, item, *token_ids, draft_s=draft_s)
        made.draft_of(item)
    note(made, item, *token_ids, draft_s=draft_s)
    return made, item


def drafts_with(*token_ids: int, num_steps: int = 100, draft_s: float = 0.4) -> ExecutorDrafts:
    return guessed(*token_ids, num_steps=num_steps, draft_s=draft_s)[0]


def flat(num_rows: int) -> float:
    return 1.0


def linear(num_rows: int) -> float:
    return float(num_rows)


def test_right_guesses_that_cost_little_are_asked_for() -> None:
    assert drafts_with(1, 2, 3, 4, 5, draft_s=0.04).choose(1, flat, 1.03) == MAX_GUESSES


def test_wrong_guesses_are_not_asked_for() -> None:
    assert drafts_with(9).choose(1, flat, 1.03) == 0


def test_right_guesses_are_not_asked_for_where_a_pass_takes_as_long_as_a_step() -> None:
    assert drafts_with(1, 2, 3, 4, 5, draft_s=4.0).choose(1, flat, 1.03) == 0


def test_right_guesses_are_not_asked_for_where_each_row_costs_a_step() -> None:
    assert drafts_with(1, 2, 3, 4, 5).choose(2, linear, 1.03) == 0


def test_draft_ends_where_guesses_become_wrong() -> None:
    # The third guess is always wrong: with passes of 0.2 s two guesses pay, and a third one does not.
    assert drafts_with(1, 2, 9, draft_s=0.8).choose(1, flat, 1.03) == 2


def test_request_without_guesses_is_left_until_it_ends() -> None:
    left, other = request(), request("b")
    note(ExecutorDrafts(guesses_once=True), left, 9, draft=None)
    note(ExecutorDrafts(), other, 9, draft=None)
    assert (left.drafting.is_left, other.drafting.is_left, request().drafting.is_left) == (True, False, False)


def test_some_guesses_are_asked_for_again_after_many_steps_without() -> None:
    (made, item), chosen = guessed(9), list[int]()
    for _ in range(2 * EXPLORE_STEPS):
        chosen.append(made.choose(1, flat, 1.03))
        note(made, item, 9, num_guesses=chosen[-1], draft=DRAFT if chosen[-1] else None)
    assert [index + 1 for index, count in enumerate(chosen) if count] == [EXPLORE_STEPS, 2 * EXPLORE_STEPS]
    assert set(chosen) == {0, EXPLORED_GUESSES}


def test_probabilities_become_those_that_were_measured() -> None:
    assert ExecutorDrafts().draft_of(request()) == Draft()
    (wrong, first), (right, second) = guessed(9), guessed(1, 2, 3, 4, 5)
    assert wrong.draft_of(first).token_ids == DRAFT.token_ids
    assert max(wrong.draft_of(first).probabilities) < 0.2
    assert min(right.draft_of(second).probabilities) > 0.95


def test_guesses_of_a_request_end_with_its_result() -> None:
    made, item = guessed(1, 2, 3, 4, 5)
    note(made, item, 7, num_guesses=0, draft=None, draft_s=0.0)
    assert made.draft_of(item) == Draft()
