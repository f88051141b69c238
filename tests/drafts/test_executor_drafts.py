from quire.drafts.executor_drafts import EXPLORE_STEPS, EXPLORED_GUESSES, MAX_GUESSES, ExecutorDrafts
from quire.sampling_params import SamplingParams
from quire.types import Draft, Request, RequestResult, ScheduledRequest, SchedulerOutput, StepResult

DRAFT = Draft((1, 2, 3, 4), (0.95,) * 4)


def output(num_guesses: int = 4) -> SchedulerOutput:
    item = ScheduledRequest("a", 3, 1, 1, (), ())
    return SchedulerOutput(1, (), (item,), (), (), (), num_draft_tokens=num_guesses)


def result(*token_ids: int, draft: Draft | None = DRAFT, draft_s: float = 0.4) -> StepResult:
    return StepResult(1, (RequestResult("a", token_ids, draft=draft),), draft_s=draft_s)


def request() -> Request:
    return Request("a", [1, 2, 3], SamplingParams(temperature=0), output_token_ids=[4])


def drafts_with(*token_ids: int, num_steps: int = 100, draft_s: float = 0.4) -> ExecutorDrafts:
    """Drafts whose guesses 1, 2, 3, 4 were followed by these tokens in each step."""
    made = ExecutorDrafts()
    for _ in range(num_steps):
        made.note(output(), result(*token_ids, draft_s=draft_s), has_prompts=False)
        made.draft_of(request())
    made.note(output(), result(*token_ids, draft_s=draft_s), has_prompts=False)
    return made


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
    made = ExecutorDrafts(guesses_once=True)
    made.note(output(), result(9, draft=None), has_prompts=False)
    other = Request("b", [1], SamplingParams())
    assert not made.may_guess([request()])
    assert made.may_guess([request(), other])
    made.forget("a")
    assert made.may_guess([request()])


def test_some_guesses_are_asked_for_again_after_many_steps_without() -> None:
    made, chosen = drafts_with(9), list[int]()
    for _ in range(2 * EXPLORE_STEPS):
        chosen.append(made.choose(1, flat, 1.03))
        made.note(output(chosen[-1]), result(9, draft=DRAFT if chosen[-1] else None), has_prompts=False)
    assert [index + 1 for index, count in enumerate(chosen) if count] == [EXPLORE_STEPS, 2 * EXPLORE_STEPS]
    assert set(chosen) == {0, EXPLORED_GUESSES}


def test_probabilities_become_those_that_were_measured() -> None:
    assert ExecutorDrafts().draft_of(request()) == Draft()
    wrong, right = drafts_with(9), drafts_with(1, 2, 3, 4, 5)
    assert wrong.draft_of(request()).token_ids == DRAFT.token_ids
    assert max(wrong.draft_of(request()).probabilities) < 0.2
    assert min(right.draft_of(request()).probabilities) > 0.95


def test_guesses_of_a_request_end_with_its_result() -> None:
    made = drafts_with(1, 2, 3, 4, 5)
    made.note(output(0), result(7, draft=None, draft_s=0.0), has_prompts=False)
    assert made.draft_of(request()) == Draft()
