"""`Yield`: the tokens that one request gets in a step, until they become its `RequestResult`.

Must not know logits. Next to read: `model_runner.py`, which samples them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.runtime.batch import RequestState
from quire.sampling.state import SamplingState
from quire.types import Draft, RequestResult, TokenLogprobs, find_stop


@dataclass(slots=True)
class Yield:
    """The tokens of one request in this step. `has_failed`: its last row of logits left no choice."""

    state: RequestState
    sampling: SamplingState
    first_row: int
    draft_token_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_failed: bool = False

    @property
    def ends(self) -> bool:
        """True if the sequence ends with the last token, or has none."""
        new = self.state.new
        assert new.sampling is not None
        num_output = self.state.num_tokens - new.num_prompt_tokens - 1
        last = self.token_ids[-1:]
        return (
            self.has_failed or find_stop(new.sampling, new.eos_token_ids, new.max_tokens, num_output, last) is not None
        )

    def split_forced(self) -> tuple[int, ...]:
        """Take the drafts that the grammar forces out of the drafts, with their rows, and return them.

        Logits decide nothing where one token is allowed; they are needed if the request wants its log-probability.
        """
        drafts = self.draft_token_ids
        if not drafts or self.sampling.params.logprobs is not None:
            return ()
        num_forced = 0
        for draft, forced in zip(drafts, self.sampling.forced, strict=False):
            if draft != forced:
                break
            num_forced += 1
        self.first_row, self.draft_token_ids = self.first_row + num_forced, drafts[num_forced:]
        return drafts[:num_forced]

    def result(self, prompt_logprobs: tuple[TokenLogprobs, ...], *, gives_draft: bool) -> RequestResult:
        """Return the request's result; with `gives_draft` also the tokens that the grammar forces next."""
        request_id = self.state.new.request_id
        tokens, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        if not self.has_failed and self.sampling.failure is None:
            forced = self.sampling.forced if gives_draft else ()
            draft = Draft(forced, (1.0,) * len(forced)) if forced else None
            return RequestResult(request_id, tokens, logprobs, prompt_logprobs, draft=draft)
        error, code = self.sampling.explain_failure()
        return RequestResult(request_id, tokens, logprobs, error=error, error_code=code)


def drop_rows(yields: Sequence[Yield], logit_rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rows of logits that requests still want, and point `first_row` into these. Mutates: yields."""
    needed = np.zeros(len(logit_rows), np.int32)
    for taken in yields:
        needed[taken.first_row : taken.first_row + 1 + len(taken.draft_token_ids)] = 1
    new_rows = np.cumsum(needed) - 1
    for taken in yields:
        taken.first_row = int(new_rows[taken.first_row])
    return logit_rows[needed > 0]
