"""Base of every object in a request body, and the request fields that several routes share.

Sampling fields have vLLM's names, under OpenAI's limits. An unlisted field is an error that names the nearest one: a
misspelt `max_token` must not pass silently. Fields of OpenAI and vLLM that would change the answer, and that this
server cannot obey, are in `UNSUPPORTED`; fields without effect here are accepted and ignored. Ranges are checked here
so that openapi.json shows them; the engine's `InputProcessor` checks what needs the model. Next to read: `chat.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StringConstraints,
    Tag,
    WithJsonSchema,
)

from quire.errors import ConfigError, InvalidParameterError
from quire.sampling_params import MAX_DRY_BREAKERS, SamplingParams
from quire.server.options import parse_keep_alive
from quire.structured_outputs import MAX_CHOICES, MAX_TEXT_BYTES, StructuredOutputsParams
from quire.text.tool_calls.schemas import closed

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_COMPLETIONS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_METADATA = 64
MAX_PROMPTS = 2048
MAX_TOKEN_IDS = 1 << 20
"""More than fit into a body."""
MAX_INTEGER = 2**31 - 1
LEAST_TOP_P = 1e-6
"""Replaces 0, which OpenAI allows: the most likely token alone."""

_REASONS = {
    "answers are given while the client waits": "background",
    "base64 is of little-endian numbers": "endianness",
    "clients' code is not run; use logit_bias, bad_words or structured_outputs": "logits_processors",
    "conversations are not compacted; send a shorter one": "compaction context_management",
    "leave it out: there is one backend for structured outputs": "guided_decoding_backend",
    "no extension reads them": "vllm_xargs",
    "nothing is padded": "padding",
    "nothing is stored; send the whole conversation as input":
        "conversation previous_input_messages previous_response_id",
    "one engine computes the whole request": "ec_transfer_params kv_transfer_params",
    "send messages or input; stored prompts do not exist here": "prompt",
    "send text or token ids": "prompt_embeds",
    "templates of clients are not run; the operator chooses one with `quire serve --chat-template`": "chat_template",
    "texts are not marked": "watermarking",
    "texts are not moderated": "moderation",
    "the answer has its items only": "enable_response_messages return_hidden_states",
    "text is filled in by /v1/completions": "suffix",
    "the routing of experts is not reported": "routed_experts_prompt_start",
    "the client runs all tools, which it sends as tools": "container mcp_servers",
    "the model of the request answers it, and no other": "fallbacks",
    "there is no beam search over HTTP; use n and top_p": "early_stopping length_penalty use_beam_search",
    "this server does not search": "web_search_options",
    "this server reads text only": "media_io_kwargs mm_payload mm_processor_kwargs return_mm_kwargs",
    "this server writes text only": "audio",
    "tools are called by /v1/chat/completions and /v1/responses": "tool_choice tools",
    "use include_reasoning, include_stop_str_in_output": "no_stop_trim separate_reasoning stream_reasoning",
    "use frequency_penalty or repetition_penalty": "repetition_detection",
    "use logprobs with a number of likeliest tokens": "logprob_token_ids",
    "reasoning is limited by /v1/chat/completions, and by /v1/responses with reasoning.max_tokens":
        "thinking thinking_token_budget",
    "use return_token_ids, and /detokenize": "return_prompt_text return_token_offsets",
    "use structured_outputs":
        "guided_choice guided_grammar guided_json guided_json_object guided_regex guided_whitespace_pattern",
    "use text.format, or output_config.format of /v1/messages": "output_format response_format",
    "use tool_choice": "function_call",
    "use tools": "functions",
    "vectors are numbers of 32 bits": "embed_dtype",
}  # fmt: skip
UNSUPPORTED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Known fields that are refused if they have a value → the reason, or what to use instead."""
WITHOUT_EFFECT = {
    "background": False, "context_management": [], "early_stopping": False, "embed_dtype": "float32",
    "enable_response_messages": False, "endianness": "native", "length_penalty": 1, "mcp_servers": [],
    "mm_payload": "tensors", "no_stop_trim": False, "return_hidden_states": False, "return_prompt_text": False,
    "return_token_offsets": False, "routed_experts_prompt_start": 0, "separate_reasoning": True,
    "stream_reasoning": True, "suffix": "", "use_beam_search": False,
}  # fmt: skip
"""Neutral values of unsupported fields, accepted because some clients, and vLLM's router, send every default."""
OTHER_NAMES = {
    "best_of": ("n",),
    "enable_thinking": ("chat_template_kwargs.enable_thinking",),
    "grammar": ("structured_outputs.grammar",),
    "input": ("messages", "prompt"),
    "json_schema": ("structured_outputs.json",),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_tokens",),
    "max_tokens": ("max_output_tokens",),
    "messages": ("input", "prompt"),
    "n_predict": ("max_tokens", "max_output_tokens"),
    "n_probs": ("logprobs", "top_logprobs"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "reasoning_budget": ("thinking_token_budget", "reasoning.max_tokens"),
    "regex": ("structured_outputs.regex",),
    "repeat_penalty": ("repetition_penalty",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "thinking_budget": ("thinking_token_budget", "reasoning.max_tokens"),
}
"""Names that other servers or routes use → names here. The hint is the first one that the request has."""


class Body(BaseModel):
    """A JSON object with known fields only; numbers are not parsed from strings. Built by the first request with it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


class LenientBody(Body):
    """An object inside a conversation. Unknown keys are dropped, because clients send back answers of this and of other
    servers with keys of their own: an agent must not fail at its second turn.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, defer_build=True)


class FieldError(ValueError):
    """A field that contradicts another one, or has a value that is not supported. `param` is its path."""

    def __init__(self, param: str, message: str, *, code: str = "invalid_parameter") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def _require(*, expected: bool) -> Callable[[bool], bool]:
    def check(value: bool) -> bool:
        if value is not expected:
            raise ValueError(f"must be {str(expected).lower()}")
        return value

    return check


# `Literal[False]` would accept 0, because it compares with `==`.
AlwaysFalse = Annotated[
    StrictBool, AfterValidator(_require(expected=False)), WithJsonSchema({"const": False, "type": "boolean"})
]
AlwaysTrue = Annotated[
    StrictBool, AfterValidator(_require(expected=True)), WithJsonSchema({"const": True, "type": "boolean"})
]


_Text = TypeVar("_Text")
_List = TypeVar("_List")
TextOrList = Annotated[
    Annotated[_Text, Tag("<text>")] | Annotated[_List, Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<text>"),
]
"""A union whose errors are about one of its members: without the tags, they would be about both."""


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    if isinstance(first, list):
        return "<lists of ids>"
    return "<ids>" if isinstance(first, int) else "<texts>"


def _check_keep_alive(value: float | str) -> float | str:
    try:
        parse_keep_alive(value)
    except ConfigError:
        raise ValueError("must be seconds or a duration such as 5m, 1h30m, 0 or -1") from None
    return value


Text = Annotated[str, Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
# The first bad item is enough: a list of a million of them must not make a million errors.
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)]
Stop = TextOrList[StopString, Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]]
Prompts = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<lists of ids>")],
    Discriminator(_kind_of_prompt),
]
"""A prompt or several, each as text or as token ids; the first item decides which of the four."""
TokenIdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
"""A token id as the key of an object."""
Metadata = Annotated[dict[str, Any], Field(max_length=MAX_METADATA)]
ShortText = Annotated[str, Field(max_length=512)]
KeepAlive = Annotated[
    Annotated[float, Tag("<number>")] | Annotated[ShortText, Tag("<text>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<number>"),
    AfterValidator(_check_keep_alive),
]
"""Seconds or a duration such as "5m"; 0: until the request ends; below 0: as long as there is room."""
ModelName = Annotated[str, Field(max_length=512), AfterValidator(lambda name: name or None)]
"""Unset or empty: the served model."""
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:-]+$")]
TruncationSide = Literal["left", "right"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "standard_only"]


def prompt_list(prompt: Prompts) -> list[str] | list[list[int]]:
    """Return a value of `Prompts` as a list of prompts."""
    value: Any = prompt
    if isinstance(value, str) or isinstance(value[0], int):
        return [value]
    several: list[str] | list[list[int]] = value
    return several


# --- Structured output ------------------------------------------------------------------------


ConstraintText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_BYTES)]
SchemaName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
SchemaDescription = Annotated[str, Field(max_length=1024)]


class JsonSchema(Body):
    """A schema with a name, which has no effect. Schemas are always enforced strictly."""

    name: SchemaName
    description: SchemaDescription | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Free text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's field: exactly one of the first five."""

    json_: (
        Annotated[
            Annotated[ConstraintText, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
            Discriminator(lambda value: "<text>" if isinstance(value, str) else "<object>"),
        ]
        | None
    ) = Field(None, alias="json")
    json_object: bool | None = None
    regex: ConstraintText | None = None
    choice: Annotated[list[ConstraintText], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: ConstraintText | None = None
    disable_any_whitespace: bool | None = False
    disable_additional_properties: AlwaysFalse | None = False
    """Must be false: the schema itself says whether an object may have other properties."""
    whitespace_pattern: ConstraintText | None = None
    structural_tag: None = None


def _closed(schema: dict[str, Any]) -> Any:
    """Return the schema without other keys for objects that state neither `required` nor `additionalProperties`.

    Without this a model may write an object without any declared key, and keys of its own up to the length limit.
    """
    return closed(schema, lambda part: bool(part.get("properties")) and "required" not in part)


def check_formats(response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None) -> None:
    """Raises: FieldError for a format without its schema, and for both fields at once."""
    if response_format is None:
        return
    has_schema = response_format.json_schema is not None
    if has_schema != (response_format.type == "json_schema"):
        raise FieldError(
            "response_format.json_schema",
            "response_format.json_schema goes with the type json_schema, and with no other",
        )
    if structured_outputs is not None and response_format.type != "text":
        raise FieldError("structured_outputs", "response_format and structured_outputs exclude each other")


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Rename parameters in errors to the fields that the client sent.

    `names` maps the engine's name to the field. The name of an object stands for all of its fields.
    Raises: InvalidParameterError.
    """
    try:
        yield
    except InvalidParameterError as error:
        name = names.get(error.field) or names.get(error.field.partition(".")[0])
        if name is None:
            raise
        raise InvalidParameterError(name, error.value, error.limit) from None


# --- Fields -----------------------------------------------------------------------------------


class StreamOptions(Body):
    """Additions to a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False
    """Accepted for compatibility: nothing is ever padded."""


class IgnoredFields(Body):
    """Fields without effect on the answer. `keep_alive` is Ollama's, for servers that load models on demand."""

    keep_alive: KeepAlive | None = None
    user: ShortText | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in_memory", "24h", "in-memory"] | None = None


class SamplingFields(IgnoredFields):
    """Sampling parameters. Unset values are the model's recommendation, then `SamplingParams`' defaults."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    top_n_sigma: float | None = Field(None, ge=-1, le=1000)
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    dry_multiplier: float | None = Field(None, ge=0, le=100)
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=0, le=MAX_INTEGER)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    dry_sequence_breakers: Annotated[list[StopString], Field(max_length=MAX_DRY_BREAKERS)] | None = None
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=100)
    mirostat_eta: float | None = Field(None, ge=0, le=1)
    dynatemp_range: float | None = Field(None, ge=0, le=2)
    dynatemp_exponent: float | None = Field(None, ge=0, le=10)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=1000)
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=128)] | None = None
    allowed_token_ids: TokenIds | None = None
    logit_bias: dict[TokenIdText, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIASES
    )
    min_tokens: int | None = Field(None, ge=0, le=MAX_INTEGER)
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: AlwaysTrue | None = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    truncation_side: TruncationSide | None = None
    """Side on which tokens are cut off. Unset: "left", so that the end of the prompt is kept."""
    priority: int | None = Field(0, ge=-MAX_INTEGER, le=MAX_INTEGER)
    deadline_s: float | None = Field(None, gt=0, le=MAX_INTEGER)
    """Seconds in which the answer must be complete; then the request ends with an error."""
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    request_id: RequestId | None = None
    session_id: ShortText | None = None
    stream_interval: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """This field and `session_id` are for vLLM's router and engine: they change no answer."""
    stream: bool | None = False
    structured_outputs: StructuredOutputs | None = None

    @property
    def keeps_start(self) -> bool:
        """Return whether truncation keeps the beginning of a prompt, not its end."""
        return self.truncation_side == "right"

    def sampling_values(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the client set."""
        chosen = {
            name: value
            for name in SHARED_NAMES
            if name in self.model_fields_set and (value := getattr(self, name, None)) is not None
        }
        if isinstance(self.stop, str):
            chosen["stop"] = [self.stop]
        if self.top_p == 0:
            chosen["top_p"] = LEAST_TOP_P
        return chosen


class ChoiceFields(SamplingFields):
    """Fields of both chat and plain completions, beyond the sampling fields."""

    model: ModelName | None = None
    n: int | None = Field(1, ge=1, le=MAX_COMPLETIONS)
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    store: bool | None = None
    response_format: ResponseFormat | None = None

    def sampling_values(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the client set. Raises: InvalidParameterError."""
        chosen, form = super().sampling_values(), self.response_format
        if self.structured_outputs is not None:
            given = self.structured_outputs.model_dump(
                by_alias=True, exclude_none=True, exclude={"disable_additional_properties"}
            )
            if given.get("json_object") is False:
                del given["json_object"]
            chosen["structured_outputs"] = StructuredOutputsParams(**given)
        elif form is not None and form.json_schema is not None:
            chosen["structured_outputs"] = StructuredOutputsParams(json=_closed(form.json_schema.schema_))
        elif form is not None and form.type == "json_object":
            chosen["structured_outputs"] = StructuredOutputsParams(json_object=True)
        return chosen

    def renamed(self) -> dict[str, str]:
        """Return names for `renaming`: a schema sent as `response_format` keeps that name in errors."""
        has_schema = self.response_format is not None and self.response_format.json_schema is not None
        return {"structured_outputs": "response_format.json_schema.schema"} if has_schema else {}

    def check_together(self) -> None:
        """Raises: FieldError for fields that contradict each other."""
        check_formats(self.response_format, self.structured_outputs)
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "prompt_logprobs cannot be streamed: leave out one of the two")


SHARED_NAMES = tuple(
    name
    for name in (*SamplingFields.model_fields, *ChoiceFields.model_fields)
    if name in SamplingParams.__dataclass_fields__ and name != "structured_outputs"
)
"""Fields of `SamplingParams` with the same name and type; `structured_outputs` has another type here."""
