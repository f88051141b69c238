"""`SamplingState`: one request's parameters and tokens, as far as sampling needs them.

Must not know logits or tensors. Next to read: `token_history.py`: the lists it keeps.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.grammar.matcher import Failure, TokenMatcher
from quire.grammar.reasoning import ReasoningMatcher
from quire.sampling.token_history import BadWords, Repeats, TokenCounts, leaves_a_token
from quire.sampling_params import SamplingParams
from quire.structured_outputs import STRUCTURED_OUTPUTS_FAILED
from quire.types import NewRequest, TokenLogprobs

logger = logging.getLogger("quire.sampling")
Sampled = tuple[int | None, TokenLogprobs | None]
"""The token, None if the logits leave no choice, and its log-probabilities if asked for."""
NO_CHOICE = (
    "no token can be chosen: the logits hold NaN or +inf, or are all -inf; "
    "the model overflowed (try dtype='float32') or its weights are damaged (`quire rm`, then `quire pull`)"
)
"""The error of a request that got no token for no other known reason."""
NOT_ALLOWED = "structured_outputs allows none of allowed_token_ids here: leave one of the two out"


def position_logprobs(
    token_id: int, logprob: float, rank: int, top_ids: Sequence[int], top_values: Sequence[float]
) -> TokenLogprobs:
    """Return one token and the likeliest ones, best first, without repeating it; equal ones have the same rank."""
    ids, values, ranks = [token_id], [logprob], [rank]
    top_rank = 1
    for place, (top_id, top_value) in enumerate(zip(top_ids, top_values, strict=True)):
        if place and top_value < top_values[place - 1]:
            top_rank = place + 1
        if top_id != token_id:
            ids.append(top_id)
            values.append(top_value)
            ranks.append(top_rank)
    return TokenLogprobs(tuple(ids), tuple(values), tuple(ranks))


def log_failure(request_id: str, failure: Failure) -> None:
    """Log a failure that the request's form did not cause."""
    if not failure.is_client_error:
        logger.error("request %r fails: %s", request_id, failure.reason)


def _make_repeats(new: NewRequest, params: SamplingParams, token_bytes: Sequence[bytes]) -> Repeats | None:
    if not params.penalises_repeats:
        return None
    breakers = [breaker.encode() for breaker in params.dry_breakers] if token_bytes else []
    return Repeats(new.token_ids[: new.num_prompt_tokens], params.dry_penalty_last_n, breakers, token_bytes)


def _only_ids(params: SamplingParams, failure: Failure | None) -> npt.NDArray[np.int64] | None:
    """Return the only tokens that may ever be chosen, ascending; None: all."""
    if params.allowed_token_ids is None and failure is None:
        return None
    return np.array(sorted(params.allowed_token_ids or ()) if failure is None else [], np.int64)


class SamplingState:
    """A request's parameters and its tokens, as far as these need them.

    Attributes:
        num_tokens: of the sequence: the position of the next draw.
        plain_from: number of tokens from which nothing changes the logits before a draw.
        greedy_from: number of tokens from which the request wants only the argmax of the unchanged logits.
        num_best: see `SamplingParams`.
        best_from: number of tokens from which the request wants only the `num_best` best of the unchanged logits.
        follows_tokens: True if `append` must see each token; else its caller may just count `num_tokens` up.
        failure: reason why no token can be chosen; None while there is none.
        options: the row sampler's own record of this request.
        is_alone: True if its rows are chosen one by one, with Python functions or llama.cpp's samplers.
        output_ids: tokens generated so far, kept where bad words or logits processors read them.
        mirostat_mu: largest surprise in bits that mirostat allows the next token; None without mirostat.
        next_mirostat_mu: `mirostat_mu` once the token that was sampled is appended.
        repeats: repetitions that DRY penalises; None without DRY.
    """

    def __init__(
        self,
        new: NewRequest,
        params: SamplingParams,
        vocab_size: int,
        matcher: TokenMatcher | ReasoningMatcher | None = None,
        failure: Failure | None = None,
        token_bytes: Sequence[bytes] = (),
    ) -> None:
        """`matcher`: of `structured_outputs`, at the beginning of the text; `failure`: why there is none.

        `token_bytes`: the text of each token, for DRY's breakers."""
        self.request_id = new.request_id
        self.params = params
        self.seed = new.seed
        self.num_tokens = new.num_prompt_tokens
        self._vocab_size = vocab_size
        self._num_prompt_tokens = new.num_prompt_tokens
        end_ids = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(new.eos_token_ids))
        self._end_ids = {token_id for token_id in end_ids if token_id < vocab_size}
        self._bad_words = BadWords(new.bad_words_token_ids) if new.bad_words_token_ids else None
        self.output_ids: list[int] = []
        self.is_alone = bool(params.logits_processors) or params.uses_chain
        self._keeps_output = self._bad_words is not None or bool(params.logits_processors)
        self.mirostat_mu: float | None = None
        if params.mirostat:
            self.mirostat_mu = 2 * params.mirostat_tau if new.mirostat_mu is None else new.mirostat_mu
        self.next_mirostat_mu = self.mirostat_mu
        self.repeats = _make_repeats(new, params, token_bytes)
        self._matcher = matcher
        self._only = _only_ids(params, failure)
        self._allowed: npt.NDArray[np.int64] | None = None
        self._knows_allowed = False
        self._forced: tuple[int, ...] | None = None
        self.failure = failure
        self.options: Any = None
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1:
            self.counts = TokenCounts(new.token_ids[: new.num_prompt_tokens])
        elif params.frequency_penalty or params.presence_penalty:
            self.counts = TokenCounts()
        is_plain = params.takes_logits_as_they_are
        self.plain_from = new.num_prompt_tokens + params.min_tokens if is_plain else sys.maxsize
        self.greedy_from = self.plain_from if params.is_greedy else sys.maxsize
        self.num_best = params.num_best(vocab_size)
        self.best_from = self.plain_from if self.num_best else sys.maxsize
        self.follows_tokens = self._keeps_output or self.counts is not None or matcher is not None or params.uses_chain
        for token_id in new.token_ids[new.num_prompt_tokens :]:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Append one generated token."""
        self.num_tokens += 1
        self.mirostat_mu = self.next_mirostat_mu
        if self._keeps_output:
            self.output_ids.append(token_id)
        if self.repeats is not None:
            self.repeats.add(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self._matcher is not None:
            self._matcher.append(token_id)
            self._knows_allowed, self._forced = False, None

    def fail(self, error: Exception, reason: str | None = None) -> None:
        """Note that the request cannot be sampled: it ends with an error."""
        logger.error("request %r fails: it cannot be sampled", self.request_id, exc_info=error)
        unknown = f"this request could not be sampled ({type(error).__name__}); the engine's log says more"
        self.failure = Failure(reason or unknown, is_client_error=False)

    def explain_failure(self) -> tuple[str, str | None]:
        """Return the reason why the request got no token, and `STRUCTURED_OUTPUTS_FAILED` if its form is to blame."""
        if self.failure is None:
            return NO_CHOICE, None
        return self.failure.reason, STRUCTURED_OUTPUTS_FAILED if self.failure.is_client_error else None

    @property
    def has_grammar(self) -> bool:
        """True if the allowed tokens may change after each token."""
        return self._matcher is not None

    @property
    def allowed(self) -> npt.NDArray[np.int64] | None:
        """Return the only tokens that may be chosen now, ascending; None: all. If it is empty, `failure` says why."""
        if self._matcher is None:
            return self._only
        if not self._knows_allowed:
            self._allowed, self._knows_allowed = self._find_allowed(self._matcher), True
        return self._allowed

    def _find_allowed(self, matcher: TokenMatcher | ReasoningMatcher) -> npt.NDArray[np.int64] | None:
        found = matcher.allowed()
        self.failure = self.failure or matcher.failure
        if self.failure is not None:
            log_failure(self.request_id, self.failure)
        elif self._only is not None:
            found = self._only if found is None else np.intersect1d(found, self._only, assume_unique=True)
            found = found[[token_id not in matcher.banned for token_id in found.tolist()]]
            self.failure = None if len(found) else Failure(NOT_ALLOWED)
        return found

    @property
    def forced(self) -> tuple[int, ...]:
        """Return tokens that must come next, whatever the logits are; none if the grammar leaves a choice."""
        if self._matcher is None or self._only is not None:
            return ()
        if self._forced is None:
            self._forced = tuple(self._matcher.forced())
        return self._forced

    @property
    def bans_end(self) -> bool:
        """True if min_tokens are not reached."""
        return self.num_tokens - self._num_prompt_tokens < self.params.min_tokens

    @property
    def varies_bans(self) -> bool:
        """True if the banned tokens may change after each token."""
        return self._bad_words is not None or (self._matcher is not None and self._matcher.may_ban)

    def banned_next(self) -> set[int]:
        """Return the tokens that bad_words, min_tokens and reasoning before a constrained answer forbid now.

        Those of bad_words and min_tokens only if an allowed token is left.
        """
        always: set[int] = set() if self._matcher is None else set(self._matcher.banned)
        banned = set(self._end_ids) if self.bans_end else set()
        if self._bad_words is not None:
            banned |= self._bad_words.banned_next(self.output_ids)
        if banned and leaves_a_token(banned | always, self.allowed, self._vocab_size):
            return banned | always
        return always
