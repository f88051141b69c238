"""Logits to tokens, for a batch in which every row may want something else.

    raw logprobs → structured_outputs, allowed_token_ids → bad_words, min_tokens → logit_bias
    → repetition, frequency, presence penalties
    → greedy: argmax | else temperature → min_p → top_k → top_p → draw by (seed, position)

A row's token does not depend on the other rows. On a CPU rows are the native sampler's, elsewhere PyTorch's; both do
the above in this order and draw with the same numbers, so that their tokens differ only where probabilities in their
last bits do. Must not know of blocks, schedules or the model. What a request says about tokens (ids below the
vocabulary size) was checked when it was added to the engine.
Next to read: `state.py`, then `native.py` or `reference.py`.
"""

from collections.abc import Mapping, Sequence

import torch

from quire import _native
from quire.errors import InvalidParameterError, QuireError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.failures import Failure
from quire.grammar.matcher import TokenMatcher
from quire.sampling.native import NativeRowSampler
from quire.sampling.reference import ReferenceRowSampler
from quire.sampling.rows import RowSampler, Sampled
from quire.sampling.state import SamplingState, log_failure
from quire.structured_outputs import FORM_FAILED, StructuredOutputsParams
from quire.types import NewRequest, TokenLogprobs

NO_CHOICE = (
    "no token can be chosen: the logits hold NaN or +inf, or are all -inf; "
    "the model overflowed or its weights are damaged, try dtype='float32'"
)
"""What to tell the caller of a request whose token is None, where nothing else is known."""
NO_GRAMMARS = "structured_outputs needs a tokenizer, and this executor was given none"


class Sampler:
    """Chooses one token per row of logits, as each request's `SamplingParams` say.

    Holds no random state: a request's draws are a function of its seed and the number of tokens it has.
    Attributes: `grammars` makes the matchers of `structured_outputs`; it is set when the tokenizer is there.
    """

    def __init__(self, vocab_size: int, device: torch.device, pool: _native.ThreadPool | None = None) -> None:
        """`pool`: threads that share the rows on a CPU; without, the caller's does all."""
        self.vocab_size = vocab_size
        self.rows: RowSampler = NativeRowSampler(vocab_size, pool) if device.type == "cpu" else ReferenceRowSampler()
        self.grammars: GrammarCompiler | None = None
        self._states: dict[str, SamplingState] = {}
        self._failures: dict[str, Failure] = {}
        """Requests whose grammar could not be had, and why."""

    def add_request(self, new: NewRequest) -> None:
        """Start to sample for a request, if it samples; one that was preempted or forked brings its tokens along."""
        params = new.sampling
        if params is None:
            return
        matcher = None
        if params.structured_outputs is not None:
            matcher = self._start_matcher(new.request_id, params.structured_outputs)
        state = SamplingState(new, params, self.vocab_size, matcher)
        self._states[new.request_id] = state
        self.rows.add(state)

    def _start_matcher(self, request_id: str, spec: StructuredOutputsParams) -> TokenMatcher | None:
        """It was checked before the request was queued, so that a failure here is rare; it is the request's alone."""
        if self.grammars is None:
            self._failures[request_id] = Failure(NO_GRAMMARS)
            return None
        try:
            return self.grammars.compile(spec).start()
        except (QuireError, ValueError) as error:
            # A form that cannot be compiled is refused by name; nothing else that goes wrong here is the client's.
            failure = Failure(str(error), is_of_form=isinstance(error, InvalidParameterError))
            log_failure(request_id, failure)
            self._failures[request_id] = failure
            return None

    def remove_request(self, request_id: str) -> None:
        """Forget a request; an unknown id is fine."""
        self._states.pop(request_id, None)
        self._failures.pop(request_id, None)
        self.rows.remove(request_id)

    def failure(self, request_id: str) -> tuple[str, str | None]:
        """Why a request got no token, and `FORM_FAILED` if the form of its text is to blame."""
        found = self._failures.get(request_id) or self._states[request_id].failure
        if found is None:
            return NO_CHOICE, None
        return found.reason, FORM_FAILED if found.is_of_form else None

    def append_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tell which tokens were appended to a request; an unknown one, which does not sample, is fine.

        `sample` does not append: the scheduler decides.
        """
        if (state := self._states.get(request_id)) is not None:
            for token_id in token_ids:
                state.append(token_id)

    def ends_any(self, tokens: Mapping[str, Sampled]) -> bool:
        """Whether any of these requests got the last token of its text, or none at all."""
        return any(
            token_id is None or self._states[request_id].ends_with(token_id)
            for request_id, (token_id, _) in tokens.items()
        )

    def is_plain_greedy(self, request_ids: Sequence[str]) -> bool:
        """Whether none of these requests wants anything but the likeliest token now."""
        return all(self._states[request_id].is_plain_greedy for request_id in request_ids)

    def sample(self, logits: torch.Tensor, request_ids: Sequence[str]) -> list[Sampled]:
        """Choose the next token of each request, with its log-probabilities where asked for.

        A row that leaves no choice (NaN, +inf or all -inf) gets None; the others are as without it.
        Shapes: logits [S, V], one row per request. Dtypes: fp32. Mutates: logits.
        """
        sampled = self.rows.sample(logits, [self._states[request_id] for request_id in request_ids])
        if not self._failures:
            return sampled
        return [
            (None, None) if request_id in self._failures else one
            for request_id, one in zip(request_ids, sampled, strict=True)
        ]

    def prompt_logprobs(self, logits: torch.Tensor, next_token_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
        """Log-probability of each next prompt token, and the `num` likeliest (-1: all).

        Shapes: logits [S, V], those before each token; next_token_ids [S]. Dtypes: any float.
        """
        return self.rows.logprobs(logits, next_token_ids, num)
