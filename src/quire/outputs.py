"""Results as callers see them: texts, tokens, log-probabilities, vectors, beams and times of a request. No tensors.

Next to read: `types.py`, the messages between scheduler and executor, then `engine/output_processor.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one token, its 1-based rank in the vocabulary, and its text."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""Token id → Logprob at one position."""


@dataclass(slots=True)
class CompletionOutput:
    """A completion of a prompt, so far.

    `finish_reason`: "stop", "length", "abort", "error", or None while running. `stop_reason`: the stop string
    or stop token id that matched; None for EOS. `error`: the reason, if `finish_reason` is "error".
    `error_code`: `STRUCTURED_OUTPUTS_FAILED` if the request's structured output is the cause, else the code of a
    `QuireError` that ended it, such as `EngineDeadError.code` if the engine stopped, or None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_code: str | None = None

    @property
    def finished(self) -> bool:
        """True if this completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class ChatCompletionOutput(CompletionOutput):
    """A completion of a chat. `text` is the whole generated text.

    `message`: the same in the format of the chat API: `role`, `content`, and where there are such `reasoning` and
    `tool_calls`, whose `arguments` are JSON text. A client may append it to the messages.
    """

    message: dict[str, Any]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`; None where it has not happened."""

    arrival_time_s: float
    first_scheduled_time_s: float | None = None
    first_token_time_s: float | None = None
    last_token_time_s: float | None = None
    finished_time_s: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token_s(self) -> float | None:
        """From arrival to the first token."""
        if self.first_token_time_s is None:
            return None
        return self.first_token_time_s - self.arrival_time_s


@dataclass(slots=True)
class RequestOutput:
    """A request so far: all text and tokens since its start (cumulative, as in vLLM).

    `num_cached_tokens`: prompt tokens whose KV came from the prefix cache. `metrics` come with the final output.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector of length E."""

    embedding: list[float]


@dataclass(slots=True)
class PoolingRequestOutput:
    """The result of `encode` or `embed` for one prompt.

    `finish_reason`: "stop"; "abort" or "error" with an empty embedding, and what went wrong in `error`; `error_code` is
    the code of a `QuireError` that did.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0
    finish_reason: str = "stop"
    error: str | None = None
    error_code: str | None = None


@dataclass(slots=True)
class ScoringOutput:
    """A probability, or the cosine of two embeddings."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The result of `score` for one pair."""

    outputs: ScoringOutput
    finished: bool = True


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each label, in the order of the head's rows."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Return the number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """The result of `classify` for one prompt."""

    outputs: ClassificationOutput
    finished: bool = True


@dataclass(slots=True)
class BeamSearchSequence:
    """A beam: its generated tokens, text and scores."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]


Prompt = str | Sequence[int] | dict[str, object]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
