"""Answer models of several routes, and the shape of every error.

openapi.json is made from the answer models. The server itself writes plain dicts, which cost less per chunk of a
stream; tests validate them with these models. Next to read: `chat.py`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from quire import __version__

FINGERPRINT = f"quire-{__version__}"
"""OpenAI's `system_fingerprint`: equal requests get equal answers while it stays the same."""


class Answer(BaseModel):
    """A JSON object with known fields only. Servers build no checks of them."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), defer_build=True)


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
    """llama.cpp's field: whether the model is in memory. "restarting": its engine died and is started again."""

    value: Literal["loaded", "loading", "restarting", "unloaded", "sleeping"]


class ModelCard(Answer):
    """A model, under the name that requests use. `created` is when the server started.

    `vocabulary` is the same for models whose token ids mean the same. It, `max_model_len` and `has_chat_template` are
    null before the model is loaded for the first time.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    has_chat_template: bool | None
    vocabulary: str | None
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
