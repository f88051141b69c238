"""Tools in a chat request, and their calls in messages and answers.

Next to read: `../tools.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from quire.server.protocol.answers import Answer
from quire.server.protocol.base import Body, FieldError

MAX_TOOLS = 128
ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class FunctionDefinition(Body):
    """A function; `parameters` is the JSON Schema of its arguments."""

    name: ToolName
    description: Annotated[str, Field(max_length=16384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Functions are the only tools."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """One of the functions."""

    name: ToolName


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedNames(Body):
    """Some of the functions, of which the model may call some, or must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """The model is told of these functions only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


def check_tool(value: Any) -> Any:
    """Raises: FieldError for tools that are not functions."""
    kind = value.get("type", "function") if isinstance(value, dict) else "function"
    if kind != "function":
        raise FieldError(
            "type", f"{str(kind)[:100]} is no tool of this server: the only tools are of the type function, "
            "which the client runs by itself",
        )  # fmt: skip
    return value


def kind_of_choice(value: Any) -> str:
    """The member of a union that a `tool_choice` means."""
    if not isinstance(value, dict):
        return "<text>"
    return "<allowed>" if value.get("type") == "allowed_tools" else "<object>"


Tools = Annotated[list[Annotated[Tool, BeforeValidator(check_tool)]], Field(max_length=MAX_TOOLS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[NamedTool, Tag("<object>")]
    | Annotated[AllowedTools, Tag("<allowed>")],
    Discriminator(kind_of_choice),
]


def chat_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """As templates and parsers read them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that the model is told of, and the call that it must make: both as the chat API writes them."""

    tools: list[dict[str, Any]]
    choice: str | dict[str, Any]

    @property
    def demands(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice != "auto"


def offer_of(tools: list[dict[str, Any]] | None, choice: Any, *, has_form: bool) -> Offer | None:
    """What `tools` and `tool_choice` of a request mean, both as the chat API writes them; None: nothing is called.

    has_form: `structured_outputs` gives the answer a form. A `response_format` is of text, and calls are none.
    Raises: FieldError where they contradict each other, or the form of the answer.
    """
    choice, allowed = choice or "auto", None
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        named = choice["allowed_tools"]
        choice, allowed = named["mode"], [tool["function"]["name"] for tool in named["tools"]]
    if choice == "none" or (tools is None and choice == "auto" and allowed is None):
        return None
    if tools is None:
        raise FieldError("tool_choice", "tool_choice demands a call, but there are no tools")
    offer = Offer(tools if allowed is None else _only(tools, allowed), choice)
    if offer.demands and has_form:
        raise FieldError("tool_choice", "tool_choice demands a call, and the answer can have no other form besides")
    return offer


def _only(tools: list[dict[str, Any]], names: Iterable[str]) -> list[dict[str, Any]]:
    found = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        if name not in found:
            raise FieldError("tool_choice", f'tool_choice allows "{name}", which is none of the tools')
    return [found[name] for name in dict.fromkeys(names)]


class CalledFunction(Body):
    """What was called; `arguments` is JSON as text."""

    name: ToolName
    arguments: str


class ToolCall(Body):
    """A call in a message of the assistant, as it came in an answer."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] | None = "function"
    function: CalledFunction
    index: int | None = None


# --- Answers ----------------------------------------------------------------------------------


class AnswerFunction(Answer):
    """What is called; `arguments` is JSON as text."""

    name: str
    arguments: str


class AnswerToolCall(Answer):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class FunctionDelta(Answer):
    """The name at first, then pieces of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """What is new of a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta
