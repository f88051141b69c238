"""Request and answer of `/v1/responses`, and the conversion to a chat request.

Calls and their results are items of the input. Nothing is stored: `store: true` and references to earlier responses
are refused. Next to read: `response_tools.py`, `routes/responses.py`.
"""

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from quire.server.protocol.answers import Answer, ChosenLogprob
from quire.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_TEMPLATE_VARIABLES,
    ChatRequest,
    Content,
    Message,
    ReasoningOptions,
    ResultContent,
    TextPart,
    reasoning_text,
    refuse_reasoning,
)
from quire.server.protocol.fields import (
    MAX_INTEGER,
    MAX_LOGPROBS,
    AlwaysFalse,
    Body,
    FieldError,
    JsonSchema,
    LenientBody,
    Metadata,
    ModelName,
    ResponseFormat,
    SamplingFields,
    SchemaDescription,
    SchemaName,
    StreamOptions,
    TextOrList,
)
from quire.server.protocol.response_tools import (
    AllowedFunctions,
    FunctionChoice,
    FunctionToolChoice,
    ResponseTools,
    chat_tool_choice,
    chat_tools,
    joined_name,
)
from quire.server.protocol.tools import ArgumentsText, CalledFunction, ToolCall, ToolName

ItemId = Annotated[str, Field(max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputMessage(LenientBody):
    """A turn, or an output item of an earlier answer, unchanged."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    @model_validator(mode="after")
    def _check(self) -> "InputMessage":
        refuse_reasoning("content", self.role, self.content)
        return self


class InputReasoning(LenientBody):
    """Reasoning of an earlier answer, unchanged. Its text is its content, or else its summary; `encrypted_content` of
    other servers has none.
    """

    type: Literal["reasoning"]
    content: list[Any] | None = None
    summary: list[Any] | None = None

    @property
    def thought(self) -> str:
        """Return its text."""
        return reasoning_text(self.content) or reasoning_text(self.summary)


class InputFunctionCall(LenientBody):
    """A call from an earlier answer, unchanged; `arguments` is JSON as text."""

    type: Literal["function_call"]
    call_id: ItemId
    name: ToolName
    namespace: ToolName | None = None
    arguments: ArgumentsText


class InputFunctionResult(LenientBody):
    """The result of the call with the same `call_id`."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: ResultContent

    @model_validator(mode="after")
    def _check(self) -> "InputFunctionResult":
        refuse_reasoning("output", "tool", self.output)
        return self


KINDS_OF_ITEMS = ("message", "reasoning", "function_call", "function_call_output")


def _kind_of_item(value: Any) -> Any:
    if not isinstance(value, dict):
        return "message"
    # OpenAI's types let a reference be an id alone.
    return value.get("type") or ("item_reference" if set(value) - {"type"} == {"id"} else "message")


def _check_item(value: Any) -> Any:
    kind = _kind_of_item(value)
    if kind == "item_reference":
        raise FieldError("type", "nothing is stored that an item_reference could mean: send the item itself")
    if kind not in KINDS_OF_ITEMS:
        expected = ", ".join(KINDS_OF_ITEMS)
        raise FieldError("type", f"items of the input are of the types {expected}, not {str(kind)[:100]}")
    return value


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[InputFunctionCall, Tag("<function_call>")]
    | Annotated[InputFunctionResult, Tag("<function_call_output>")],
    Discriminator(lambda value: f"<{_kind_of_item(value)}>"),
    BeforeValidator(_check_item),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]


# --- Conversion to the chat API ---------------------------------------------------------------


def chat_messages(items: list[InputItem]) -> list[Message]:
    """Return the same conversation as messages. The assistant's items between two others are one message."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputFunctionResult):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            messages.append(Message(role=item.role, content=item.content))
        elif not isinstance(item, InputReasoning) or item.thought:
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant", content=""))
            _add_item(messages[-1], item)
    return messages


def _add_item(turn: Message, item: InputMessage | InputReasoning | InputFunctionCall) -> None:
    """Add an item to the assistant's turn. Mutates: `turn`."""
    if isinstance(item, InputFunctionCall):
        function = CalledFunction.model_construct(name=joined_name(item.namespace, item.name), arguments=item.arguments)
        call = ToolCall.model_construct(id=item.call_id, type="function", function=function)
        turn.tool_calls = [*(turn.tool_calls or ()), call]
        return
    if isinstance(item, InputMessage):
        message = Message(role="assistant", content=item.content)
        thought = message.reasoning
        turn.content = [*_parts(turn.content), *_parts(message.content)] if turn.content else message.content
    else:
        thought = item.thought
    if thought:
        turn.reasoning = f"{turn.reasoning}\n{thought}" if turn.reasoning else thought


def _parts(content: Content | None) -> list[TextPart]:
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content or []


# --- The request -----------------------------------------------------------------------------


WITH_LOGPROBS = "message.output_text.logprobs"


class TextFormat(Body):
    """Free text, any JSON object, or JSON that follows a schema; the fields beside `type` need `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: SchemaDescription | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "TextFormat":
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise FieldError("schema", "text.format.schema goes with the type json_schema, and with no other")
        return self


class TextOptions(Body):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(SamplingFields):
    """OpenAI's fields, and the sampling fields of the other routes."""

    model: ModelName | None = None
    input: TextOrList[Annotated[str, Field(min_length=1)], InputItems]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    store: AlwaysFalse | None = None
    tools: ResponseTools | None = None
    tool_choice: FunctionToolChoice | None = None
    """Unset: "auto"."""
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_INTEGER)
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    client_metadata: Metadata | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "ResponsesRequest":
        self.chat.check()
        return self

    @cached_property
    def chat(self) -> ChatRequest:
        """The chat request with the same meaning; its fields are already checked one by one.

        Raises: FieldError for options of reasoning that contradict each other.
        """
        wants_logprobs = WITH_LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        sent = self.model_fields_set & ChatRequest.model_fields.keys()
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages += chat_messages(self.input)
        if not messages:
            raise FieldError(
                "input", "input has no text: it is reasoning of another server that only that one can read"
            )
        fields = {name: getattr(self, name) for name in sent} | {
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "logprobs": wants_logprobs,
            "response_format": self._response_format(),
            "tools": chat_tools(self.tools),
            "tool_choice": chat_tool_choice(self.tool_choice),
        }
        chat = ChatRequest.model_construct(**fields)
        chat.settle_reasoning()
        return chat

    def _response_format(self) -> ResponseFormat | None:
        given = None if self.text is None else self.text.format
        if given is None:
            return None
        if given.schema_ is None:
            return ResponseFormat(type=given.type)
        schema = JsonSchema(name=given.name or "answer", schema=given.schema_)
        return ResponseFormat(type=given.type, json_schema=schema)


# --- Answers ----------------------------------------------------------------------------------


class OutputText(Answer):
    """The content of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenLogprob]


class OutputMessage(Answer):
    """Text of the model."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputFunctionCall(Answer):
    """A call by the model; `arguments` is JSON as text. The client sends its result back with the same `call_id`."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: ItemStatus


class ReasoningText(Answer):
    """Text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answer):
    """Reasoning of the model before its answer. `summary` is always empty."""

    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: ItemStatus


class IncompleteDetails(Answer):
    """The reason for an early end."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """Prompt tokens found in the prefix cache. `cache_write_tokens` is always 0: nothing is charged."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """Always 0: tokens are counted together."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """OpenAI's token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Answer):
    """An error in a stream that had begun. `code`: one of those that OpenAI's clients know."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseObject(Answer):
    """The whole answer, or its state in a stream."""

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
    output: list[OutputMessage | OutputFunctionCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | FunctionChoice | AllowedFunctions
    tools: ResponseTools
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
