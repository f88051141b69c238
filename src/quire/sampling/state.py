"""`SamplingState`: what is remembered of one request to sample for it.

Must not know logits or tensors. Next to read: `token_history.py`, whose lists it keeps.
"""

import logging

import numpy as np
import numpy.typing as npt

from quire.grammar.failures import Failure
from quire.grammar.matcher import TokenMatcher
from quire.sampling.token_history import BadWords, TokenCounts, leaves_a_token
from quire.sampling_params import SamplingParams
from quire.types import NewRequest

logger = logging.getLogger("quire.sampling")
NOT_ALLOWED = "structured_outputs allows none of allowed_token_ids here: leave one of the two out"


def log_failure(request_id: str, failure: Failure) -> None:
    """What the form is not to blame for is for who runs the engine to see."""
    if not failure.is_of_form:
        logger.error("request %r fails: %s", request_id, failure.reason)


class SamplingState:
    """A request's parameters and its tokens, as far as these need them.

    Attributes:
        failure: why no token can be chosen any more; None while that is not known.
    """

    def __init__(
        self, new: NewRequest, params: SamplingParams, vocab_size: int, matcher: TokenMatcher | None = None
    ) -> None:
        """`matcher`: of `structured_outputs`, at the beginning of the text."""
        self.request_id = new.request_id
        self.params = params
        self.seed = new.seed
        self.num_tokens = new.num_prompt_tokens
        self._vocab_size = vocab_size
        self._num_prompt_tokens = new.num_prompt_tokens
        end_ids = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(new.eos_token_ids))
        self._end_ids = {token_id for token_id in end_ids if token_id < vocab_size}
        self._bad_words = BadWords(new.bad_words_token_ids) if new.bad_words_token_ids else None
        self._output_ids: list[int] = []
        self._matcher = matcher
        self._only = None if params.allowed_token_ids is None else np.array(sorted(params.allowed_token_ids), np.int64)
        self._allowed: npt.NDArray[np.int64] | None = None
        self.failure: Failure | None = None
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1:
            self.counts = TokenCounts(new.token_ids[: new.num_prompt_tokens])
        elif params.frequency_penalty or params.presence_penalty:
            self.counts = TokenCounts()
        self._is_plain_greedy = (
            params.is_greedy
            and params.logprobs is None
            and params.allowed_token_ids is None
            and not params.logit_bias
            and self.counts is None
            and self._bad_words is None
            and params.structured_outputs is None
        )
        for token_id in new.token_ids[new.num_prompt_tokens :]:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take note of one generated token."""
        self.num_tokens += 1
        if self._bad_words is not None:
            self._output_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self._matcher is not None:
            self._matcher.append(token_id)
            self._allowed = None

    def ends_with(self, token_id: int) -> bool:
        """Whether this token ends the text; one that comes before `min_tokens` does not, and is not told apart."""
        return token_id in self._end_ids

    @property
    def has_grammar(self) -> bool:
        """Whether what is allowed may be different after each token."""
        return self._matcher is not None

    @property
    def allowed(self) -> npt.NDArray[np.int64] | None:
        """The only tokens that may be chosen now, ascending; None: all. If none may, `failure` says why."""
        if self._matcher is None:
            return self._only
        if self._allowed is None:
            found = self._matcher.allowed()
            self.failure = self._matcher.failure
            if self.failure is not None:
                log_failure(self.request_id, self.failure)
            if self._only is not None and self.failure is None:
                found = np.intersect1d(found, self._only, assume_unique=True)
                self.failure = None if len(found) else Failure(NOT_ALLOWED)
            self._allowed = found
        return self._allowed

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the argmax of the logits as they are is all this request wants now."""
        return self._is_plain_greedy and not self.bans_end

    @property
    def bans_end(self) -> bool:
        """Whether min_tokens are not reached."""
        return self.num_tokens - self._num_prompt_tokens < self.params.min_tokens

    @property
    def has_bad_words(self) -> bool:
        """Whether what is banned may be different after each token."""
        return self._bad_words is not None

    def banned_next(self) -> set[int]:
        """Tokens that bad_words and min_tokens forbid now; none if they would leave no allowed token."""
        banned = set(self._end_ids) if self.bans_end else set()
        if self._bad_words is not None:
            banned |= self._bad_words.banned_next(self._output_ids)
        if not banned or leaves_a_token(banned, self.allowed, self._vocab_size):
            return banned
        return set()
