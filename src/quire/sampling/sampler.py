"""Logits to tokens, for a batch in which every row may want something else.

    raw logprobs → structured_outputs, allowed_token_ids → bad_words, min_tokens → logit_bias
    → repetition, frequency, presence penalties
    → greedy: argmax | else temperature → min_p → top_k → top_p → draw by (seed, position)

A row's token does not depend on the other rows. On a CPU rows are the native sampler's, elsewhere PyTorch's; both do
the above in this order and draw with the same numbers, so that their tokens differ only where probabilities in their
last bits do. Requests with llama.cpp's samplers take its order: `chain.py`. Must not know of blocks, schedules or the
model. Token ids in a request's parameters were checked when it was added to the engine.
Next to read: `state.py`, then `native.py` or `reference.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quire import _native
from quire.errors import InvalidParameterError, QuireError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import Failure
from quire.lazy_torch import torch
from quire.sampling.chain import as_row, choose
from quire.sampling.native import NativeRowSampler
from quire.sampling.state import Sampled, SamplingState, log_failure
from quire.types import NewRequest, TokenLogprobs

if TYPE_CHECKING:
    from quire.sampling.reference import ReferenceRowSampler  # it imports torch

Grammars = GrammarCompiler
"""Maker of the matchers of `structured_outputs`."""
NO_GRAMMARS = "structured_outputs needs a tokenizer, and this executor was given none"
NO_BREAKERS = "dry_sequence_breakers need a tokenizer, and this executor was given none: pass an empty list"


class Sampler:
    """Chooses one token per row of logits, as each request's `SamplingParams` say.

    Holds neither requests nor random state: a draw is a function of a request's seed and its number of tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        device: str,
        pool: _native.ThreadPool | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`pool`: threads that share the rows on a CPU; None: the caller's thread computes all.

        `grammars`: makes the matchers of `structured_outputs`.
        """
        self.vocab_size = vocab_size
        self.rows: NativeRowSampler | ReferenceRowSampler = (
            NativeRowSampler(vocab_size, pool) if device == "cpu" else _reference_rows()
        )
        self._grammars = grammars

    def start(self, new: NewRequest) -> SamplingState | None:
        """Return the record of a new request; None if it does not sample. Its tokens may include generated ones."""
        if new.sampling is None:
            return None
        matcher, failure, token_bytes = None, None, cast(Sequence[bytes], ())
        spec, needs_text = new.sampling.structured_outputs, new.sampling.penalises_repeats and new.sampling.dry_breakers
        try:
            # Checked before the request was queued: a failure here is rare, and ends this request alone.
            if spec is not None:
                matcher = None if self._grammars is None else self._grammars.start(new.request_id, spec)
                failure = Failure(NO_GRAMMARS) if matcher is None else None
            if needs_text:
                token_bytes = () if self._grammars is None else self._grammars.token_bytes()
                failure = failure or (None if token_bytes else Failure(NO_BREAKERS))
        except Exception as error:
            # A form that cannot be compiled is refused by name; other failures here are not the client's.
            reason = str(error) if isinstance(error, QuireError | ValueError) else repr(error)
            failure = Failure(reason, is_client_error=isinstance(error, InvalidParameterError))
            log_failure(new.request_id, failure)
        state = SamplingState(new, new.sampling, self.vocab_size, matcher, failure, token_bytes)
        self.rows.add(state)
        return state

    def sample(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """Choose the next token of each row, with its log-probabilities if asked for. It is not appended.

        A row that leaves no choice (NaN, +inf or all -inf) gets None; this changes no other row.
        Shapes: logits [S, V], states [S]. Dtypes: fp32. Mutates: logits.
        """
        return self.choose(logits, states)

    def choose(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """`sample` on this rank, whatever other ranks do. Asked again, it chooses the same tokens."""
        alone = [row for row, state in enumerate(states) if state.is_alone]
        if not alone:
            return self.rows.sample(logits, states)
        others = [row for row, state in enumerate(states) if not state.is_alone]
        found = dict(zip(others, self.rows.sample(logits[others], [states[row] for row in others]), strict=True))
        return [
            found[row] if row in found else self._choose_one(logits[row], states[row]) for row in range(len(states))
        ]

    def _choose_one(self, logits: Any, state: SamplingState) -> Sampled:
        """Choose the token of a row with logits processors or llama.cpp's samplers. Shapes: logits [V]."""
        row = as_row(logits)
        for processor in state.params.logits_processors or ():
            try:
                row = np.array(processor(list(state.output_ids), row), np.float32)
                if row.shape != (self.vocab_size,):
                    raise ValueError(f"it returned the shape {row.shape}, not ({self.vocab_size},)")
            except Exception as error:
                state.fail(error, f"a logits processor failed: {type(error).__name__}: {error}")
                return None, None
        as_rows: Any = row[None] if isinstance(logits, np.ndarray) else torch.from_numpy(row).to(logits.device)[None]
        if not state.params.uses_chain:
            return self.rows.sample(as_rows, [state])[0]
        token_id, num = choose(row.copy(), state), state.params.logprobs
        if token_id is None or num is None:
            return token_id, None
        return token_id, self.rows.logprobs(as_rows, [token_id], num)[0]

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
