"""`/v1/responses`: the request, and what its answer is made of.

Nothing is stored: `store: true` and references to earlier responses are refused. Next to read: `routes/responses.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from quire.server.protocol.answers import Answer
from quire.server.protocol.base import Body, FieldError
from quire.server.protocol.chat import MAX_TEMPLATE_VARIABLES, check_variables
from quire.server.protocol.fields import (
    MAX_INTEGER,
    MAX_LOGPROBS,
    ModelName,
    SamplingFields,
    StreamOptions,
    text_or_list,
)
from quire.server.protocol.forms import JsonSchema, ResponseFormat, check_forms
from quire.server.protocol.response_items import (
    AllowedFunctions,
    FunctionChoice,
    FunctionTool,
    FunctionToolChoice,
    FunctionTools,
    InputItems,
    ItemStatus,
    check_results,
)
from quire.server.protocol.tools import Offer, offer_of

WITH_LOGPROBS = "message.output_text.logprobs"


class TextFormat(Body):
    """Free text, any JSON object, or JSON that follows a schema; its fields beside `type` go with `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")] | None = None
    description: Annotated[str, Field(max_length=1024)] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "TextFormat":
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise FieldError("schema", "text.format.schema goes with the type json_schema, and with no other")
        return self

    def response_format(self) -> ResponseFormat:
        """The same as the chat API writes it."""
        if self.schema_ is None:
            return ResponseFormat(type=self.type)
        return ResponseFormat(type=self.type, json_schema=JsonSchema(name=self.name or "answer", schema=self.schema_))


class TextOptions(Body):
    """What the text looks like."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(SamplingFields):
    """OpenAI's fields, and the sampling fields of the other routes."""

    model: ModelName | None = None
    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("<text>")] | Annotated[InputItems, Tag("<list>")],
        Discriminator(text_or_list),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    tools: FunctionTools | None = None
    tool_choice: FunctionToolChoice | None = None
    """Unset: "auto"."""
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_INTEGER)
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None

    @property
    def response_format(self) -> ResponseFormat | None:
        """`text.format` as the chat API writes it."""
        return None if self.text is None or self.text.format is None else self.text.format.response_format()

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are part of the answer."""
        return WITH_LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @model_validator(mode="after")
    def _check(self) -> "ResponsesRequest":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs stream: true")
        check_forms(self.response_format, self.structured_outputs)
        check_variables(self.chat_template_kwargs)
        if not isinstance(self.input, str):
            check_results(self.input)
        self.offer()
        return self

    def offer(self) -> Offer | None:
        """The tools that may be called. Raises: FieldError."""
        tools = [tool.chat_tool() for tool in self.tools or ()]
        choice = self.tool_choice if isinstance(self.tool_choice, str | None) else self.tool_choice.chat_choice()
        return offer_of(tools or None, choice, has_form=self.structured_outputs is not None)


# --- Answers ----------------------------------------------------------------------------------


class OutputTokenLogprob(Answer):
    """A token that was possible at a position."""

    token: str
    bytes: list[int]
    logprob: float


class OutputLogprob(OutputTokenLogprob):
    """The token at a position, and the likeliest there, best first."""

    top_logprobs: list[OutputTokenLogprob]


class OutputText(Answer):
    """The content of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[OutputLogprob]


class OutputMessage(Answer):
    """Text that the model says."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputFunctionCall(Answer):
    """A call that the model makes; `arguments` is JSON as text. Its result is sent back with the same `call_id`."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class IncompleteDetails(Answer):
    """Why an answer ends early."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """Of the prompt's tokens, those found in the prefix cache. `cache_write_tokens` is always 0: nothing is charged."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """Always 0: models that reason apart are not known here."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """OpenAI's count of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Answer):
    """What went wrong in a stream that had begun."""

    code: str
    message: str


class ResponseObject(Answer):
    """The whole answer; in a stream, its state."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage | OutputFunctionCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | FunctionChoice | AllowedFunctions
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(Answer):
    """One event of a stream; which fields it has beyond these two depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputMessage | OutputFunctionCall | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[OutputLogprob] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
