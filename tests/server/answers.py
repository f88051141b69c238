"""Answers of the server as models: openapi.json is made from them, and tests hold answers to them.

The server itself writes plain dicts, which cost less per chunk of a stream.
Next to read: `response_answers.py`, `document.py`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """A JSON object with known fields only."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class ErrorContent(Answer):
    """`param` is the dotted path of the wrong field; `code` is stable and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The shape of every error."""

    error: ErrorContent


class PromptTokensDetails(Answer):
    """Prompt tokens found in the prefix cache, and tokens cut off by `truncate_prompt_tokens`."""

    cached_tokens: int
    truncated_tokens: int | None = None


class Usage(Answer):
    """OpenAI's token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(Answer):
    """llama.cpp's timings: computed and cached tokens of the prompt, then generated ones.

    Units: `_ms` milliseconds. `predicted_` times run from the first token to the last, of all choices together.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class AnswerHead(Answer):
    """Fields of every chat completion and completion, and of their chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    timings: Timings | None = None


class TokenLogprob(Answer):
    """A likely token at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """The sampled token at a position, and the most likely ones, best first."""

    top_logprobs: list[TokenLogprob]


class PromptLogprob(Answer):
    """A token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Token id → log-probability, for each position of the prompt; the first has none."""


class ModelStatus(Answer):
    """llama.cpp's field: whether the model is in memory."""

    value: Literal["loaded", "loading", "unloaded", "sleeping"]


class ModelCard(Answer):
    """A model, under the name that requests use. `created` is when the server started.

    `max_model_len` is null before the model is loaded for the first time.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    status: ModelStatus


class SleepAnswer(Answer):
    """State of a model after `/sleep` and `/wake_up`."""

    is_sleeping: bool


class ModelList(Answer):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(Answer):
    """The server's version."""

    version: str


class StatusAnswer(Answer):
    """The answer of a probe."""

    status: str


class AnswerFunction(Answer):
    """The called function; `arguments` is JSON as text."""

    name: str
    arguments: str


class AnswerToolCall(Answer):
    """A call by the model."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class ChatLogprobs(Answer):
    """Log-probabilities with an entry per token."""

    content: list[ChosenLogprob]
    refusal: None = None


class AnswerMessage(Answer):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(Answer):
    """An answer among `n`."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(AnswerHead):
    """The whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Answer):
    """Parallel lists, one entry per token; the first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """A continuation, or new parts of it in a stream. Choice `index` belongs to prompt `index // n`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(AnswerHead):
    """The whole answer, or one event of a stream. With `include_usage` the last event has the usage and no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Embedding(Answer):
    """The vector of an input: numbers, or base64 of little-endian fp32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """OpenAI's token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer):
    """The whole answer, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenizeAnswer(Answer):
    """`token_strs`: the vocabulary's entries, if `return_token_strs` was set."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    """The text."""

    prompt: str


class Score(Answer):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Answer):
    """The scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(Answer):
    """A document of the request."""

    text: str


class Ranked(Answer):
    """A document's score and its index in the request."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankAnswer(Answer):
    """The best documents first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class Classified(Answer):
    """The likeliest label, and the probability of each."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Answer):
    """An entry per input, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage
