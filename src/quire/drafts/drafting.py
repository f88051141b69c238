"""`Drafting`: gives requests drafts where they are expected to raise tokens per second, between an engine's steps.

Every request that decodes is asked for a draft; then the draft tokens of all of them are taken, the likeliest first, as
long as more tokens per second come of it: the expected tokens of a step, over its time with that number of rows. The
time is measured by rows while the engine runs, acceptance by the proposer, also of drafts that were not verified. A
wrong draft costs time only: verification leaves every output as it is without drafts (`ModelRunner._sample`).
Next to read: `suffix.py` for the drafts, `scheduler/step_plan.py` for the step that verifies them.
"""

import math
from collections.abc import Sequence
from typing import Any

from quire.config import EngineConfig
from quire.drafts.executor_drafts import ExecutorDrafts
from quire.drafts.suffix import SuffixProposer
from quire.memory_plan import PROMPT_LOGPROB_ROWS
from quire.scheduler.pace import moving_average
from quire.scheduler.request import Request, SequenceUpdate
from quire.types import Draft, SchedulerOutput, StepResult

MAX_DRAFT_TOKENS = 24
"""Tokens of one draft."""
MIN_GAIN = 1.03
"""Expected tokens per second, relative to those without drafts, below which a step verifies none."""
ASSUMED_ROW_COST = 0.15
"""Time of a further row as a share of a step with one row, until steps with more rows were measured; steps of many rows
are assumed to grow half as fast as their rows. To be wrong costs a few steps; a higher price would never be tested."""
UNTRIED_ROWS = 16
"""Rows by which a step may have more than twice the most rows that were measured."""
HOT_SHARE = 0.25
"""Share of a request's last tokens that were right drafts, from which on it is asked after each token."""
COLD_TOKENS = 8
"""Tokens after which a request without drafts is asked again: to ask 8 requests at each token took 2 to 3 % of the time
of a small model's steps."""
_NEWEST_TOKEN = 0.05


class StepTimes:
    """Time of a decode step by its number of rows, as a moving average of the steps of each number."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def note(self, num_rows: int, seconds: float) -> None:
        """Take note of one forward pass."""
        self._seconds[num_rows] = moving_average(self._seconds.get(num_rows), seconds)

    def seconds(self, num_rows: int) -> float:
        """Return the expected time, from the nearest measured numbers of rows; 0 if there is none, infinity for far
        more rows than were measured.

        More rows never take less time: on a busy machine they seem to, and each draft would pay.
        """
        below = max((rows for rows in self._seconds if rows <= num_rows), default=None)
        above = min((rows for rows in self._seconds if rows >= num_rows), default=None)
        if below is None:
            return 0.0 if above is None else self._seconds[above]
        at_below = max(seconds for rows, seconds in self._seconds.items() if rows <= below)
        if above is None:
            is_tried = num_rows <= 2 * below + UNTRIED_ROWS
            return at_below * (1 + (num_rows - below) * min(ASSUMED_ROW_COST, 0.5 / below)) if is_tried else math.inf
        if above == below:
            return at_below
        return at_below + max(0.0, self._seconds[above] - at_below) * (num_rows - below) / (above - below)


class Drafting:
    """Drafts of one engine; none if its configuration says so."""

    def __init__(self, config: EngineConfig) -> None:
        self.proposer: SuffixProposer | None = None if config.speculative == "off" else SuffixProposer()
        self._of_executor = ExecutorDrafts(guesses_once=config.speculative in ("mtp", "eagle"))
        self._has_guesses = False
        """True if guesses came with the results of the step before."""
        self._has_draft_model = config.speculative in ("draft", "mtp", "eagle")
        self._max_rows = max(config.scheduler.max_num_seqs, PROMPT_LOGPROB_ROWS)
        """Rows of logits that a step can have."""
        self._times = StepTimes()

    def give_drafts(self, running: Sequence[Request], *, overlaps: bool = False) -> None:
        """Set the drafts of the requests that run. Mutates: running.

        `overlaps`: a step is in flight, and its requests get none. Those that are due for a draft expect one: they are
        not scheduled ahead again, so that a later call finds them out of flight.
        """
        if self.proposer is None:
            return
        self.proposer.forget_finished()
        if overlaps:
            for request in running:
                request.expects_drafts |= request.num_tokens >= request.drafting.asked_from
            running = [request for request in running if not request.num_in_flight]
        if not running or any(request.num_uncomputed_tokens != 1 for request in running):
            return  # a step with prompts is long already
        drafts = [self._propose(request) for request in running]
        lengths = self._choose_lengths(drafts)
        num_guesses = 0
        if self._has_draft_model and not all(request.drafting.is_left for request in running):
            num_guesses = self._of_executor.choose(len(running), self._times.seconds, MIN_GAIN)
        for request, draft, length in zip(running, drafts, lengths, strict=True):
            if not request.draft_token_ids:  # else others gave it some
                request.draft_token_ids = draft.token_ids[:length]
            record = request.drafting
            is_hot = num_guesses > 0 or record.accepted_share >= HOT_SHARE
            request.num_guesses, request.expects_drafts = num_guesses, is_hot
            if request.num_tokens >= record.asked_from:
                record.asked_from = request.num_tokens + (1 if length or is_hot else COLD_TOKENS)

    def _propose(self, request: Request) -> Draft:
        num_left = request.max_tokens - len(request.output_token_ids) - 1
        if request.sampling is None or request.awaits_external_token or request.siblings or num_left < 1:
            return Draft()
        assert self.proposer is not None
        max_tokens = min(MAX_DRAFT_TOKENS, num_left)
        is_due = request.num_tokens >= request.drafting.asked_from
        draft = self.proposer.propose(request, max_tokens) if is_due else Draft()
        other = self._of_executor.draft_of(request) if self._has_guesses else Draft()
        if _expected_tokens(other) <= _expected_tokens(draft):
            return draft
        return Draft(other.token_ids[:max_tokens], other.probabilities[:max_tokens])

    def _choose_lengths(self, drafts: Sequence[Draft]) -> list[int]:
        """Return the number of tokens to verify of each draft."""
        offers: list[tuple[float, int, int]] = []
        for index, draft in enumerate(drafts):
            reached = 1.0
            for ahead, probability in enumerate(draft.probabilities):
                reached *= probability
                offers.append((-reached, ahead, index))
        lengths = [0] * len(drafts)
        seconds = self._times.seconds(len(drafts))
        if not offers or not seconds:
            return lengths
        offers = sorted(offers)[: max(0, self._max_rows - len(drafts))]
        expected, num_taken, best = float(len(drafts)), 0, MIN_GAIN * len(drafts) / seconds
        for num_offers, (reached, _, _) in enumerate(offers, 1):
            expected -= reached
            rate = expected / self._times.seconds(len(drafts) + num_offers)
            if rate > best:
                num_taken, best = num_offers, rate
        for _, _, index in offers[:num_taken]:
            lengths[index] += 1
        return lengths

    def note_step(
        self,
        output: SchedulerOutput,
        result: StepResult,
        updates: Sequence[SequenceUpdate],
        seconds: float,
        *,
        has_prompts: bool,
    ) -> dict[str, Any]:
        """Take note of a step that was computed. Mutates: the records of the requests of `updates`.

        `seconds`: from its schedule to its outputs. `has_prompts`: see `SchedulerOutput`. Returns: the draft tokens it
        verified, those that were right, and both by draft, as fields of its event.
        """
        if self.proposer is None:
            return {"num_drafts": 0, "num_accepted": 0, "drafts": ()}
        token_ids = {item.request_id: item.token_ids for item in result.results}
        has_guesses = any(item.draft is not None for item in result.results)
        if has_guesses or self._has_guesses or output.num_draft_tokens:
            self._of_executor.note(output, result, updates, has_prompts=has_prompts)
        self._has_guesses = has_guesses
        drafts: list[tuple[int, int]] = []
        records = {update.result.request_id: update.request.drafting for update in updates}
        for item in output.scheduled:
            num_drafts = len(item.draft_token_ids)
            num_yielded = len(token_ids.get(item.request_id, ()))
            num_accepted = min(num_drafts, max(0, num_yielded - 1))
            if num_drafts:
                drafts.append((num_drafts, num_accepted))
            if num_yielded and (record := records.get(item.request_id)) is not None:
                kept = (1 - _NEWEST_TOKEN) ** num_yielded
                record.accepted_share = record.accepted_share * kept + (1 - kept) * num_accepted / num_yielded
        if output.num_tokens and not (has_prompts or result.is_lost):
            self._times.note(output.num_tokens, (seconds - result.draft_s) / result.num_iterations)
        num_verified, num_right = (sum(counts) for counts in zip(*drafts, strict=True)) if drafts else (0, 0)
        return {"num_drafts": num_verified, "num_accepted": num_right, "drafts": tuple(drafts)}


def _expected_tokens(draft: Draft) -> float:
    """Return the number of tokens of a draft that are expected to be right."""
    expected, reached = 0.0, 1.0
    for probability in draft.probabilities:
        reached *= probability
        expected += reached
    return expected
