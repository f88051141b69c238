"""What the answers of several routes share, and the shape of every error. The description of the API is made of these;
answers themselves are plain dicts, because a stream has no time for more, and tests hold them to these.

Next to read: `chat.py`.
"""

from pydantic import BaseModel, ConfigDict

from quire import __version__

FINGERPRINT = f"quire-{__version__}"
"""OpenAI's `system_fingerprint`: answers to equal requests are equal while it stays the same."""


class Answer(BaseModel):
    """A JSON object of which all fields are known."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class ErrorContent(Answer):
    """`param` is the dotted path of the field that is wrong; `code` is stable and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every error has this shape."""

    error: ErrorContent


class PromptTokensDetails(Answer):
    """Of the prompt's tokens, those found in the prefix cache; and those that were cut off before it was read."""

    cached_tokens: int
    truncated_tokens: int | None = None


class Usage(Answer):
    """OpenAI's count of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(Answer):
    """llama.cpp's report of what the answer took: computed and cached tokens of the prompt, then generated ones.

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


class PromptLogprob(Answer):
    """One token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Token id → log-probability, for each position of the prompt; the first has none."""
