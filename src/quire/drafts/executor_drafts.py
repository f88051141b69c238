"""`ExecutorDrafts`: decides how many tokens the executor's draft model guesses, and how far its guesses are trusted.

Acceptance is measured by position in the draft, and by the probability that the draft model gave; the time of a pass by
the number of requests. Guesses are asked for where they are expected to raise tokens per second. Where they do not, one
step in `EXPLORE_STEPS` asks, since texts change. Next to read: `drafting.py`, the caller; `runtime/drafter.py`.
"""

from collections.abc import Callable, Hashable, Sequence

from quire.scheduler.pace import moving_average
from quire.scheduler.request import DraftRecord, Request, SequenceUpdate
from quire.types import Draft, SchedulerOutput, StepResult

MAX_GUESSES = 8
"""Tokens of one draft: at most the smallest block, so that tables have an entry for each."""
EXPLORE_STEPS = 256
"""Steps without guesses after which some are asked for."""
EXPLORED_GUESSES = 2
FIRST_ACCEPTANCE = 0.9
"""Assumed acceptance before any was measured: to ask too often costs a few steps at the start only."""
NUM_CLASSES = 10
"""Classes of a draft model's probabilities whose acceptance is measured together."""
PRIOR_WEIGHT = 8.0
"""Guesses that the draft model's own probability counts for."""
_NEWEST = 0.05


class ExecutorDrafts:
    """Measured acceptance and time of the executor's guesses."""

    def __init__(self, *, guesses_once: bool = False) -> None:
        """`guesses_once`: a request that gets no guess when some are asked for gets none later, either."""
        self._guesses_once = guesses_once
        self._by_position = [FIRST_ACCEPTANCE] * MAX_GUESSES
        self._seen: set[int] = set()
        """Positions in drafts whose acceptance was measured."""
        self._of_class: dict[Hashable, tuple[float, float]] = {}
        """Right and all guesses, by class."""
        self._pass_s: dict[int, float] = {}
        self._guessed: list[DraftRecord] = []
        """Those of requests for which guesses came with the last step."""
        self._num_without = 0

    def choose(self, num_requests: int, step_s: Callable[[int], float], min_gain: float) -> int:
        """Return how many tokens to guess behind a step in which `num_requests` decode; 0: none.

        `step_s`: time of a step without guesses by its number of rows. `min_gain`: least gain in tokens per second.
        """
        alone = step_s(num_requests)
        best, num_guesses, expected, reach = min_gain, 0, 1.0, 1.0
        for count in range(1, MAX_GUESSES + 1):
            reach *= self._acceptance(count - 1)
            expected += reach
            seconds = step_s(num_requests * (1 + count)) + count * self._pass_seconds(num_requests)
            gain = expected * alone / seconds if seconds else 0.0
            if gain > best:
                best, num_guesses = gain, count
        self._num_without = 0 if num_guesses else self._num_without + 1
        return num_guesses if self._num_without < EXPLORE_STEPS else EXPLORED_GUESSES

    def draft_of(self, request: Request) -> Draft:
        """Return the guesses that came with the last step, with probabilities as they were measured."""
        record, draft = request.drafting, request.drafting.guess
        if draft is None or request.sampling is None:
            return Draft()
        if min(draft.probabilities, default=0.0) == 1.0:  # a grammar forces them: they tell nothing of guesses
            return draft
        record.is_offered, is_greedy = True, request.sampling.temperature == 0
        return Draft(draft.token_ids, tuple(self._rate(is_greedy, given) for given in draft.probabilities))

    def note(
        self, output: SchedulerOutput, result: StepResult, updates: Sequence[SequenceUpdate], *, has_prompts: bool
    ) -> None:
        """Compare the guesses of the step before with the tokens that came, and take up those of this step.

        Mutates: the records of the requests of `updates`.
        """
        for update in updates:
            record, sampling = update.request.drafting, update.request.sampling
            if record.is_offered and record.guess is not None and sampling is not None:
                self._judge(record.guess, sampling.temperature == 0, update.result.token_ids)
        goes_on = bool(self._guessed)  # the first pass after a pause computes many tokens, and does not count
        for record in self._guessed:
            record.guess, record.is_offered = None, False
        self._guessed = []
        for update in updates:
            record, draft = update.request.drafting, update.result.draft
            if draft is not None:
                record.guess = draft
                self._guessed.append(record)
            elif self._guesses_once and output.num_draft_tokens:
                record.is_left = True
        if self._guessed:
            self._num_without = 0
        if goes_on and output.num_draft_tokens and result.draft_s and not has_prompts:
            drafts = (record.guess for record in self._guessed)
            num_passes = max((len(draft.token_ids) for draft in drafts if draft is not None), default=1)
            seconds, rows = result.draft_s / max(1, num_passes), len(output.scheduled)
            self._pass_s[rows] = moving_average(self._pass_s.get(rows), seconds)

    def _judge(self, guesses: Draft, is_greedy: bool, token_ids: Sequence[int]) -> None:
        pairs = zip(guesses.token_ids, guesses.probabilities, token_ids, strict=False)
        for ahead, (guess, probability, token_id) in enumerate(pairs):
            is_right = guess == token_id
            if ahead < MAX_GUESSES:
                before = self._by_position[ahead] if ahead in self._seen else self._acceptance(ahead)
                self._by_position[ahead] = before + _NEWEST * (is_right - before)
                self._seen.add(ahead)
            kind = _class_of(probability, is_greedy)
            num_right, num_all = self._of_class.get(kind, (0.0, 0.0))
            self._of_class[kind] = num_right * (1 - _NEWEST / 4) + is_right, num_all * (1 - _NEWEST / 4) + 1
            if not is_right:
                break

    def _acceptance(self, ahead: int) -> float:
        """Return the share of right guesses at this position behind right ones."""
        while ahead and ahead not in self._seen:
            ahead -= 1
        return self._by_position[ahead]

    def _rate(self, is_greedy: bool, probability: float) -> float:
        num_right, num_all = self._of_class.get(_class_of(probability, is_greedy), (0.0, 0.0))
        return (num_right + PRIOR_WEIGHT * probability) / (num_all + PRIOR_WEIGHT)

    def _pass_seconds(self, num_requests: int) -> float:
        if not self._pass_s:
            return 0.0
        nearest = min(self._pass_s, key=lambda rows: abs(rows - num_requests))
        return self._pass_s[nearest]


def _class_of(probability: float, is_greedy: bool) -> Hashable:
    return is_greedy, min(NUM_CLASSES - 1, int(probability * NUM_CLASSES))
