"""Logits to tokens, for a batch in which every row may want something else.

    raw logprobs → structured_outputs, allowed_token_ids → bad_words, min_tokens → logit_bias
    → repetition, frequency, presence penalties
    → greedy: argmax | else temperature → min_p → top_k → top_p → draw by (seed, position)

A row's token does not depend on the other rows. On a CPU rows are the native sampler's, elsewhere PyTorch's; both do
the above in this order and draw with the same numbers, so that their tokens differ only where probabilities in their
last bits do. Must not know of blocks, schedules or the model. Token ids in a request's parameters were checked when it
was added to the engine.
Next to read: `state.py`, then `native.py` or `reference.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire import _native
from quire.errors import InvalidParameterError, QuireError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import Failure
from quire.sampling.native import NativeRowSampler
from quire.sampling.state import Sampled, SamplingState, log_failure
from quire.types import NewRequest, TokenLogprobs

if TYPE_CHECKING:
    from quire.sampling.reference import ReferenceRowSampler  # it imports torch

NO_GRAMMARS = "structured_outputs needs a tokenizer, and this executor was given none"


class Sampler:
    """Chooses one token per row of logits, as each request's `SamplingParams` say.

    Holds neither requests nor random state: a draw is a function of a request's seed and its number of tokens.
    Attributes: `grammars` makes the matchers of `structured_outputs`; it is set before the first step.
    """

    def __init__(self, vocab_size: int, device: str, pool: _native.ThreadPool | None = None) -> None:
        """`pool`: threads that share the rows on a CPU; None: the caller's thread computes all."""
        self.vocab_size = vocab_size
        self.rows: NativeRowSampler | ReferenceRowSampler = (
            NativeRowSampler(vocab_size, pool) if device == "cpu" else _reference_rows()
        )
        self.grammars: GrammarCompiler | None = None

    def start(self, new: NewRequest) -> SamplingState | None:
        """Return the record of a new request; None if it does not sample. Its tokens may include generated ones."""
        if new.sampling is None:
            return None
        matcher, failure = None, None
        if (spec := new.sampling.structured_outputs) is not None:
            try:
                # Checked before the request was queued: a failure here is rare, and ends this request alone.
                matcher = None if self.grammars is None else self.grammars.compile(spec).start()
                failure = Failure(NO_GRAMMARS) if matcher is None else None
            except Exception as error:
                # A form that cannot be compiled is refused by name; other failures here are not the client's.
                reason = str(error) if isinstance(error, QuireError | ValueError) else repr(error)
                failure = Failure(reason, is_client_error=isinstance(error, InvalidParameterError))
                log_failure(new.request_id, failure)
        state = SamplingState(new, new.sampling, self.vocab_size, matcher, failure)
        self.rows.add(state)
        return state

    def sample(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """Choose the next token of each row, with its log-probabilities if asked for. It is not appended.

        A row that leaves no choice (NaN, +inf or all -inf) gets None; this changes no other row.
        Shapes: logits [S, V], states [S]. Dtypes: fp32. Mutates: logits.
        """
        return self.rows.sample(logits, states)

    def takes_shares(self, states: Sequence[SamplingState]) -> bool:
        """Return whether these rows need only the rank's share of the logits: never without other ranks."""
        return False

    def sample_shares(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """`sample`, where each rank has the logits of its share of the vocabulary. Shapes: [S, columns of a rank]."""
        raise NotImplementedError

    def prompt_logprobs(self, logits: Any, next_token_ids: Sequence[int], state: SamplingState) -> list[TokenLogprobs]:
        """Return the log-probability of each next prompt token, and the likeliest that the request asks for.

        Shapes: logits [S, V], those before each token; next_token_ids [S]. Dtypes: fp32.
        """
        assert state.params.prompt_logprobs is not None
        return self.rows.logprobs(logits, next_token_ids, state.params.prompt_logprobs)


def _reference_rows() -> "ReferenceRowSampler":
    from quire.sampling.reference import ReferenceRowSampler

    return ReferenceRowSampler()
