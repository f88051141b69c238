"""Request and answer of `/v1/messages`, Anthropic's API, and the conversion to a chat request.

The fields of a request are checked strictly, the keys inside its objects are not.
Next to read: `message_blocks.py`, `routes/messages.py`.
"""

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from quire.server.protocol.answers import Answer
from quire.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEMPLATE_VARIABLES,
    ChatRequest,
    ThinkingOptions,
)
from quire.server.protocol.fields import (
    MAX_INTEGER,
    MAX_STOP_STRINGS,
    FieldError,
    JsonSchema,
    LenientBody,
    ModelName,
    ResponseFormat,
    SamplingFields,
    ShortText,
    StopString,
)
from quire.server.protocol.message_blocks import (
    LongName,
    Texts,
    Turn,
    chat_messages,
    is_begun_answer,
    system_messages,
)
from quire.server.protocol.tools import FunctionDefinition, FunctionName, NamedTool, Tool

MAX_MESSAGES_TOOLS = 1024
"""More than of the chat API: an agent brings the tools of all its plug-ins."""


# --- Tools and options ------------------------------------------------------------------------


class MessagesTool(LenientBody):
    """A tool, which the client runs by itself; `input_schema` is the JSON Schema of its input."""

    type: Literal["custom"] | None = None
    name: LongName
    description: str | None = None
    input_schema: dict[str, Any]


def _check_tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        name = str(value.get("name", kind))[:100]
        raise FieldError(
            "type",
            f'the tool "{name}" of the type {str(kind)[:100]} is not supported: nothing runs in this server, '
            "and its models know no tools by type; send tools with an input_schema",
            code="unsupported_parameter",
        )
    return value


class MessagesToolChoice(LenientBody):
    """`auto`: the model may call tools; `any`: it must; `tool`: it must call the one named `name`; `none`: no calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: LongName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "MessagesToolChoice":
        if self.type == "tool" and self.name is None:
            raise FieldError("name", "tool_choice.name is required with the type tool")
        return self


class ThinkingConfig(LenientBody):
    """Reasoning before the answer, and its most tokens. `display` "omitted" leaves it out of the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    display: ShortText | None = None


class OutputFormat(LenientBody):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientBody):
    """Effort of the reasoning, and format of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(LenientBody):
    """An edit of the conversation, which is not made: `clear_…` only saves tokens."""

    type: Annotated[str, Field(max_length=100)]

    @model_validator(mode="after")
    def _check(self) -> "ContextEdit":
        if not self.type.startswith("clear_"):
            raise FieldError(
                "type",
                f'"{self.type}" is not supported: conversations are not summarised here',
                code="unsupported_parameter",
            )
        return self


class ContextManagement(LenientBody):
    """Edits of the conversation."""

    edits: Annotated[list[ContextEdit], Field(max_length=MAX_PARTS)] | None = None


# --- The request ------------------------------------------------------------------------------


class CountTokensRequest(SamplingFields):
    """The fields of `/v1/messages`; those that do not change the prompt have no effect."""

    model: ModelName
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    system: Texts | None = None
    tools: (
        Annotated[list[Annotated[MessagesTool, BeforeValidator(_check_tool)]], Field(max_length=MAX_MESSAGES_TOOLS)]
        | None
    ) = None
    tool_choice: MessagesToolChoice | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = Field(None, alias="stop_sequences")
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: ShortText | None = None
    speed: ShortText | None = None
    user_profile_id: ShortText | None = None
    """The last five fields have no effect."""
    thread: dict[str, Any] | None = None
    """Must be null: nothing is stored."""

    @model_validator(mode="after")
    def _check(self) -> "CountTokensRequest":
        if self.thread is not None:
            # At this code Anthropic's client sends the whole conversation instead.
            raise FieldError(
                "thread",
                "thread is not supported: nothing is stored; send the whole conversation",
                code="thread_unsupported_request",
            )
        self.chat.check()
        return self

    @cached_property
    def chat(self) -> ChatRequest:
        """The chat request with the same meaning; its fields are already checked one by one."""
        choice = self.tool_choice
        sent = self.model_fields_set & ChatRequest.model_fields.keys()
        messages = [*system_messages(self.system), *(item for turn in self.messages for item in chat_messages(turn))]
        fields: dict[str, Any] = {name: getattr(self, name) for name in sent} | {
            "continue_final_message": is_begun_answer(messages),
            "messages": messages,
            "tools": None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
            "tool_choice": None if choice is None else _chat_choice(choice),
            "parallel_tool_calls": not (choice is not None and choice.disable_parallel_tool_use),
            "thinking": None,
        }
        return ChatRequest.model_construct(**fields | self._reasoning_fields() | self._format_fields())

    def _reasoning_fields(self) -> dict[str, Any]:
        thinking = self.thinking
        found: dict[str, Any] = {}
        if thinking is not None:
            kind: Any = "adaptive" if thinking.type == "between_tools" else thinking.type
            found["thinking"] = ThinkingOptions(type=kind, budget_tokens=thinking.budget_tokens)
            if thinking.display == "omitted":
                found["include_reasoning"] = False
        effort = None if self.output_config is None else self.output_config.effort
        is_off = thinking is not None and thinking.type == "disabled"
        return found if effort is None or is_off else {**found, "reasoning_effort": effort}

    def _format_fields(self) -> dict[str, Any]:
        output = None if self.output_config is None else self.output_config.format
        if output is None:
            return {}
        schema = JsonSchema(name="answer", schema=output.schema_)
        return {"response_format": ResponseFormat(type="json_schema", json_schema=schema)}


class MessagesRequest(CountTokensRequest):
    """Anthropic's fields, and the sampling fields of the other routes."""

    max_tokens: int = Field(ge=1, le=MAX_INTEGER)


# --- Conversion to the chat API ---------------------------------------------------------------


def _chat_tool(tool: MessagesTool) -> Tool:
    function = FunctionDefinition.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema
    )
    return Tool.model_construct(type="function", function=function)


def _chat_choice(choice: MessagesToolChoice) -> Literal["none", "auto", "required"] | NamedTool:
    if choice.type == "tool":
        function = FunctionName.model_construct(name=choice.name or "")
        return NamedTool.model_construct(type="function", function=function)
    return "required" if choice.type == "any" else choice.type


# --- Answers ----------------------------------------------------------------------------------


class AnswerText(Answer):
    """Text of the model."""

    type: Literal["text"]
    text: str


class AnswerThinking(Answer):
    """Reasoning of the model. `signature` is a digest of it, which is not checked when it comes back."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUse(Answer):
    """A call by the model. The client sends its result back with the same id."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(Answer):
    """Anthropic's token counts: prompt tokens that were computed, and those from the prefix cache, are apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(Answer):
    """The whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerThinking | AnswerText | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(Answer):
    """Tokens of the prompt, those of the tools and of the template included."""

    input_tokens: int


class MessagesErrorDetails(Answer):
    """The `code` of the other routes' errors."""

    error_code: str


class MessagesErrorContent(Answer):
    """Anthropic's kind of error, and its message."""

    type: str
    message: str
    details: MessagesErrorDetails | None = None


class MessagesError(Answer):
    """The shape of every error below `/v1/messages`."""

    type: Literal["error"]
    error: MessagesErrorContent
    request_id: str | None
