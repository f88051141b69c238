"""Tools of a chat request, and calls in messages and answers.

Next to read: `../tools.py`.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from quire.server.protocol.answers import Answer
from quire.server.protocol.fields import Body, FieldError, LenientBody

MAX_TOOLS = 128
ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class ToolHints(Body):
    """Hints of clients to other servers, without effect: every tool is in the prompt, and a result is read as text."""

    allowed_callers: list[Literal["direct", "programmatic"]] | None = Field(default=None, exclude=True)
    cache_control: dict[str, Any] | None = Field(default=None, exclude=True)
    defer_loading: bool | None = Field(default=None, exclude=True)
    output_schema: dict[str, Any] | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _check_callers(self) -> "ToolHints":
        if self.allowed_callers and "direct" not in self.allowed_callers:
            message = 'allowed_callers is not supported without "direct": no program runs in this server to call a tool'
            raise FieldError("allowed_callers", message, code="unsupported_parameter")
        return self


class FunctionDefinition(ToolHints):
    """A function; `parameters` is the JSON Schema of its arguments."""

    name: ToolName
    description: Annotated[str, Field(max_length=16384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    return_: dict[str, Any] | None = Field(default=None, alias="return", exclude=True)
    """Written by Transformers' `get_json_schema`; without effect."""


class Tool(ToolHints):
    """A function, which the client runs by itself: no tool runs in this server."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """The name of a function."""

    name: ToolName


class NamedTool(Body):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: FunctionName


class AllowedNames(Body):
    """Some of the functions: the model may call one (`auto`), or must (`required`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """The only functions that the prompt describes."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


def kind_of_choice(value: Any) -> str:
    """Return the tag of the union member that a `tool_choice` is checked as."""
    if not isinstance(value, dict):
        return "<text>"
    return "<allowed>" if value.get("type") == "allowed_tools" else "<object>"


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[NamedTool, Tag("<object>")]
    | Annotated[AllowedTools, Tag("<allowed>")],
    Discriminator(kind_of_choice),
]


def tool_dicts(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return tools as templates and parsers read them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools in the prompt, and the call that the answer must be; both in the format of the chat API."""

    tools: list[dict[str, Any]]
    choice: str | dict[str, Any]


def offer_of(tools: list[Tool] | None, choice: ToolChoice | None) -> Offer | None:
    """Return the meaning of `tools` and `tool_choice`; None: no tools. Raises: FieldError if they contradict."""
    mode: str | dict[str, Any] = "auto"
    if isinstance(choice, AllowedTools):
        mode = choice.allowed_tools.mode
    elif choice is not None:
        mode = choice if isinstance(choice, str) else choice.model_dump()
    if mode == "none" or (not tools and choice in (None, "auto")):
        return None
    if not tools:
        raise FieldError("tool_choice", "tool_choice demands a call, but there are no tools")
    if isinstance(choice, AllowedTools):
        found = {tool.function.name: tool for tool in tools}
        allowed = dict.fromkeys(tool.function.name for tool in choice.allowed_tools.tools)
        for name in allowed:
            if name not in found:
                raise FieldError("tool_choice", f'tool_choice allows "{name}", which is none of the tools')
        tools = [found[name] for name in allowed]
    return Offer(tool_dicts(tools), mode)


def _arguments_text(value: Any) -> Any:
    """Return arguments as JSON text: some clients send the object itself, or null for no arguments."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else value


ArgumentsText = Annotated[
    str,
    BeforeValidator(_arguments_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}),
]
"""JSON as text, or the object itself."""


class CalledFunction(LenientBody):
    """The called function; `arguments` is JSON as text."""

    name: ToolName
    arguments: ArgumentsText = ""


class ToolCall(LenientBody):
    """A call in a message of the assistant, unchanged from an answer."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction


# --- Answers ----------------------------------------------------------------------------------


class AnswerFunction(Answer):
    """The called function; `arguments` is JSON as text."""

    name: str
    arguments: str


class AnswerToolCall(Answer):
    """A call by the model."""

    id: str
    type: Literal["function"]
    function: AnswerFunction
