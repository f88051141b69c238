"""Bodies of the routes that take prompts: `/v1/completions`, `/infill`, `/v1/embeddings`, `/tokenize`, `/detokenize`.

Next to read: `routes/completions.py`, `routes/infill.py`, `routes/embeddings.py`, `routes/tokens.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Discriminator, Field, Tag, model_validator

from quire.server.protocol.answers import Answer, AnswerHead, PromptLogprobs, Timings
from quire.server.protocol.chat import MAX_TEMPLATE_VARIABLES, Messages, check_template_fields
from quire.server.protocol.fields import (
    MAX_INTEGER,
    MAX_LOGPROBS,
    MAX_TOKEN_IDS,
    Body,
    ChoiceFields,
    FieldError,
    IgnoredFields,
    LenientBody,
    ModelName,
    Prompts,
    RequestId,
    SamplingFields,
    TokenId,
    TruncationSide,
    prompt_list,
)
from quire.server.protocol.tools import Tools

MAX_CHOICES = 2048
"""Prompts times `n`."""
MAX_FILES = 1024
DEFAULT_MAX_TOKENS = 16
CompletionPrompts = Annotated[
    Annotated[Literal[""], Tag("<empty>")] | Annotated[Prompts, Tag("<prompts>")],
    Discriminator(lambda value: "<empty>" if value == "" else "<prompts>"),
]
"""Prompts; an empty text needs a suffix."""


class CompletionRequest(ChoiceFields):
    """OpenAI's fields and vLLM's."""

    prompt: CompletionPrompts
    suffix: str | None = None
    """Text after the generated one, for a model with fill-in-the-middle tokens. Empty: the prompt is continued."""
    max_tokens: int | None = Field(DEFAULT_MAX_TOKENS, ge=0, le=MAX_INTEGER)
    """0 needs `echo`: it scores the prompt and generates nothing."""
    best_of: int | None = Field(None, ge=1, le=MAX_INTEGER)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = True

    @model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        self.check_together()
        prompts = prompt_list(self.prompt)
        num_prompts = len(prompts)
        if self.prompt == "" and not self.suffix:
            raise FieldError("prompt", "prompt must not be empty, unless there is a suffix")
        if self.suffix and not isinstance(prompts[0], str):
            raise FieldError("suffix", "suffix needs prompts as text: token ids already have the model's markers")
        num_choices = num_prompts * (self.n or 1)
        if num_choices > MAX_CHOICES:
            raise FieldError(
                "n",
                f"{num_prompts} prompts with n={self.n} are {num_choices} choices, more than {MAX_CHOICES}: "
                "send several requests",
            )
        if self.best_of not in (None, 1, self.n or 1):
            raise FieldError("best_of", f"best_of={self.best_of} is not supported: leave it out, or make it equal to n")
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "max_tokens must be at least 1; 0 scores the prompt and needs echo: true")
        return self


class CompletionLogprobs(Answer):
    """Parallel lists, one entry per token; the first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    token_bytes: dict[str, list[int]] | None = None
    """With `return_tokens_as_token_ids`: the bytes of each "token_id:N"."""


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


# --- Fill in the middle ----------------------------------------------------------------------


class ExtraFile(LenientBody):
    """Part of another file, as context."""

    filename: str | None = None
    text: str


class InfillRequest(SamplingFields):
    """llama.cpp's fields as its plugins for editors send them, and the sampling fields of the other routes."""

    model: ModelName | None = None
    input_prefix: str
    input_suffix: str
    prompt: str | None = None
    """More of the prefix: the beginning of the line to complete."""
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES)] | None = None
    n_predict: int | None = Field(None, ge=-2, le=MAX_INTEGER, validation_alias=AliasChoices("n_predict", "max_tokens"))
    """Most tokens to generate; 0 computes the prompt for the prefix cache. Unset or negative: until the text ends."""
    repetition_penalty: float | None = Field(
        None, gt=0, le=1000, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    response_fields: list[str] | None = Field(None, max_length=64)
    """Fields of the answer that are wanted; "timings/prompt_n" stands for a field of an object."""
    t_max_predict_ms: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    """Longest time from the first token on, once the text has a newline. Unset, 0 or -1: no limit."""
    cache_prompt: Any = None
    id_slot: Any = None
    lora: Any = None
    n_cache_reuse: Any = None
    n_indent: Any = None
    n_keep: Any = None
    samplers: Any = None
    t_max_prompt_ms: Any = None
    timings_per_token: Any = None
    """This field and those from `cache_prompt` on are without effect."""

    def completion(self) -> CompletionRequest:
        """Return the same request to `/v1/completions`; its fields are already checked one by one."""
        sent = self.model_fields_set & CompletionRequest.model_fields.keys()
        fields: dict[str, Any] = {name: getattr(self, name) for name in sent} | {
            "prompt": self.input_prefix + (self.prompt or ""),
            "suffix": self.input_suffix,
            "max_tokens": None if self.n_predict is None or self.n_predict < 0 else self.n_predict,
            "seed": None if self.seed == -1 else self.seed,
        }
        return CompletionRequest.model_construct(**fields)


class InfillAnswer(Answer):
    """llama.cpp's answer, or the last event of a stream; earlier events have `stop` false and no reason of the end.

    With `response_fields` it has these fields only, a field of an object under its path. `tokens_evaluated` are those
    of the prompt, `tokens_cached` those of them that the prefix cache had.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    index: int = 0
    content: str = ""
    stop: bool = True
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word"] = "limit"
    stopping_word: str = ""
    timings: Timings | None = None


# --- Embeddings ------------------------------------------------------------------------------


class PooledFields(IgnoredFields):
    """Fields of every route that computes no text. `request_id` is without effect."""

    model: ModelName | None = None
    priority: int | None = Field(0, ge=-MAX_INTEGER, le=MAX_INTEGER)
    request_id: RequestId | None = None


class EmbeddingRequest(PooledFields):
    """OpenAI's fields and a few of vLLM's."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """Length of each vector, at most the model's width: its first numbers, normalised again if `normalize` is true."""
    add_special_tokens: bool | None = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    truncation_side: TruncationSide | None = None
    """Side on which tokens are cut off. Unset: "right", so that the beginning of a text is kept."""
    normalize: bool | None = True
    use_activation: bool | None = True
    """vLLM's later name of `normalize`; false in either disables normalisation."""

    @property
    def is_normalized(self) -> bool:
        """Return whether vectors are normalised to length 1."""
        return self.normalize is not False and self.use_activation is not False


class EmbeddingItem(Answer):
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
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


# --- Tokens ----------------------------------------------------------------------------------


class TokenizeRequest(Body):
    """Either `prompt` or `messages`."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Unset: true for a prompt; false for messages, since their template writes the special tokens."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    tools: Tools | None = None
    """Needs messages: the description of the tools is part of the prompt."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        if self.tools is not None and self.messages is None:
            raise FieldError("tools", "tools need messages: a prompt is used unchanged")
        check_template_fields(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        return self


class TokenizeAnswer(Answer):
    """`token_strs`: the vocabulary's entries, if `return_token_strs` was set."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    """Token ids, special ones included."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)]


class DetokenizeAnswer(Answer):
    """The text."""

    prompt: str
