"""Tools in a chat request, and their calls in messages and answers.

Next to read: `../tools.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.server.protocol.answers import Answer
from quire.server.protocol.base import Body

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


def _text_or_object(value: Any) -> str:
    return "<object>" if isinstance(value, dict) else "<text>"


Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[NamedTool, Tag("<object>")],
    Discriminator(_text_or_object),
]


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
