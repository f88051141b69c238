"""Input items and tools of a request to `/v1/responses`, and their conversion to the chat API's messages and tools.

Functions are flat in this API; calls and their results are items. Next to read: `responses.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from quire.server.protocol.base import Body, FieldError
from quire.server.protocol.chat import MAX_MESSAGES, MAX_PARTS, Message, TextPart
from quire.server.protocol.fields import text_or_list
from quire.server.protocol.tools import (
    MAX_TOOLS,
    AllowedNames,
    AllowedTools,
    CalledFunction,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
    ToolName,
    check_tool,
    kind_of_choice,
)

ItemId = Annotated[str, Field(max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputPart(Body):
    """A part of a message's content: text of the user, or of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


InputContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[InputPart], Field(max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(text_or_list),
]


class InputMessage(Body):
    """A turn, or an output item of an earlier answer, unchanged."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: str | None = None


class InputFunctionCall(Body):
    """A call from an earlier answer, unchanged; `arguments` is JSON as text."""

    type: Literal["function_call"]
    call_id: ItemId
    name: ToolName
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None
    caller: None = None
    namespace: None = None
    """`caller` and `namespace` are part of OpenAI's answers, which clients send back unchanged."""


class InputFunctionResult(Body):
    """The result of the call with the same `call_id`."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: InputContent
    id: ItemId | None = None
    status: ItemStatus | None = None


KINDS_OF_ITEMS = ("message", "function_call", "function_call_output")


def _kind_of_item(value: Any) -> Any:
    return (value.get("type") if isinstance(value, dict) else None) or "message"


def _check_item(value: Any) -> Any:
    kind = _kind_of_item(value)
    if kind not in KINDS_OF_ITEMS:
        expected = ", ".join(KINDS_OF_ITEMS)
        raise FieldError("type", f"items of the input are of the types {expected}, not {str(kind)[:100]}")
    return value


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputFunctionCall, Tag("<function_call>")]
    | Annotated[InputFunctionResult, Tag("<function_call_output>")],
    Discriminator(lambda value: f"<{_kind_of_item(value)}>"),
    BeforeValidator(_check_item),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]


class FunctionTool(FunctionDefinition):
    """A function; `parameters` is the JSON Schema of its arguments."""

    type: Literal["function"]


class FunctionChoice(Body):
    """The function that the answer must call."""

    type: Literal["function"]
    name: ToolName


class AllowedFunctions(Body):
    """The only functions that the prompt describes: the model may call one (`auto`), or must (`required`)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]


FunctionTools = Annotated[list[Annotated[FunctionTool, BeforeValidator(check_tool)]], Field(max_length=MAX_TOOLS)]
FunctionToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[FunctionChoice, Tag("<object>")]
    | Annotated[AllowedFunctions, Tag("<allowed>")],
    Discriminator(kind_of_choice),
]


# --- Conversion to the chat API ---------------------------------------------------------------


def chat_messages(items: list[InputItem]) -> list[Message]:
    """Return the same conversation as messages. A call becomes part of the assistant's turn before it."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputMessage):
            messages.append(Message(role=item.role, content=_content(item.content)))
        elif isinstance(item, InputFunctionResult):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=_content(item.output)))
        else:
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant", content=""))
            function = CalledFunction(name=item.name, arguments=item.arguments)
            calls = messages[-1].tool_calls or []
            messages[-1].tool_calls = [*calls, ToolCall(id=item.call_id, function=function)]
    return messages


def _content(content: InputContent) -> str | list[TextPart]:
    return content if isinstance(content, str) else [TextPart(type="text", text=part.text) for part in content]


def chat_tools(tools: list[FunctionTool] | None) -> list[Tool] | None:
    """Return the same tools as the chat API's."""
    return None if tools is None else [Tool(type="function", function=tool) for tool in tools]


def chat_tool_choice(choice: FunctionToolChoice | None) -> ToolChoice | None:
    """Return the same choice as the chat API's."""
    if isinstance(choice, FunctionChoice):
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    if isinstance(choice, AllowedFunctions):
        named = [NamedTool(type="function", function=FunctionName(name=tool.name)) for tool in choice.tools]
        return AllowedTools(type="allowed_tools", allowed_tools=AllowedNames(mode=choice.mode, tools=named))
    return choice


def check_results(items: list[InputItem]) -> None:
    """Raises: FieldError for a result without its call before it: the server stores no earlier calls."""
    known = set()
    for index, item in enumerate(items):
        if isinstance(item, InputFunctionCall):
            known.add(item.call_id)
        elif isinstance(item, InputFunctionResult) and item.call_id not in known:
            raise FieldError(
                f"input.{index}.call_id",
                f'no function_call before this output has the call_id "{item.call_id[:100]}": nothing is stored here, '
                "so send the whole conversation as input",
            )
