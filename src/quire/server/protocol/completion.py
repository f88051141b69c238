"""Request and answer of `/v1/completions`.

Next to read: `routes/completions.py`.
"""

from typing import Literal

from pydantic import Field, model_validator

from quire.server.protocol.answers import Answer, PromptLogprobs, Timings, Usage
from quire.server.protocol.base import FieldError
from quire.server.protocol.fields import MAX_INTEGER, MAX_LOGPROBS, ChoiceFields, Prompts, prompt_list

MAX_CHOICES = 2048
"""Prompts times `n`."""
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(ChoiceFields):
    """OpenAI's fields and vLLM's."""

    prompt: Prompts
    max_tokens: int | None = Field(DEFAULT_MAX_TOKENS, ge=0, le=MAX_INTEGER)
    """0 needs `echo`: it scores the prompt and generates nothing."""
    best_of: int | None = Field(None, ge=1, le=MAX_INTEGER)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, always as a list."""
        return prompt_list(self.prompt)

    @model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        self.check_together()
        num_choices = len(self.prompts) * (self.n or 1)
        if num_choices > MAX_CHOICES:
            raise FieldError(
                "n",
                f"{len(self.prompts)} prompts with n={self.n} are {num_choices} choices, more than {MAX_CHOICES}: "
                "send several requests",
            )
        if self.best_of not in (None, 1, self.n or 1):
            raise FieldError("best_of", f"best_of={self.best_of} is not supported: leave it out, or make it equal to n")
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "max_tokens must be at least 1; 0 scores the prompt and needs echo: true")
        return self


# --- Answers ----------------------------------------------------------------------------------


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


class Completion(Answer):
    """The whole answer, or one event of a stream. With `include_usage` the last event has the usage and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
