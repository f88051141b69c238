"""What a request to `/v1/responses` is made of: the items of its input, and its tools.

Functions are flat here, and their calls and results are items of their own. Next to read: `responses.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from quire.server.protocol.base import Body, FieldError
from quire.server.protocol.chat import MAX_MESSAGES, MAX_PARTS
from quire.server.protocol.fields import text_or_list
from quire.server.protocol.tools import MAX_TOOLS, ToolName, check_tool, kind_of_choice

ItemId = Annotated[str, Field(max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputPart(Body):
    """One piece of a message's content: text of the user, or of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


InputContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[InputPart], Field(max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(text_or_list),
]


class InputMessage(Body):
    """One turn, or an item of an earlier answer's output, as it came."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: str | None = None


class InputFunctionCall(Body):
    """A call of the model, as it came in an earlier answer; `arguments` is JSON as text."""

    type: Literal["function_call"]
    call_id: ItemId
    name: ToolName
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None
    caller: None = None
    namespace: None = None
    """These two are part of OpenAI's answers, which clients send back as they came."""


class InputFunctionResult(Body):
    """What the client's function gave back for the call with the same `call_id`."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: InputContent
    id: ItemId | None = None
    status: ItemStatus | None = None


KINDS_OF_ITEMS = ("message", "function_call", "function_call_output")


def _check_item(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is not None and kind not in KINDS_OF_ITEMS:
        expected = ", ".join(KINDS_OF_ITEMS)
        raise FieldError("type", f"items of the input are of the types {expected}, not {str(kind)[:100]}")
    return value


def _kind_of_item(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind or 'message'}>"


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputFunctionCall, Tag("<function_call>")]
    | Annotated[InputFunctionResult, Tag("<function_call_output>")],
    Discriminator(_kind_of_item),
    BeforeValidator(_check_item),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]


class FunctionTool(Body):
    """A function; `parameters` is the JSON Schema of its arguments."""

    type: Literal["function"]
    name: ToolName
    description: Annotated[str, Field(max_length=16384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def chat_tool(self) -> dict[str, Any]:
        """The same as the chat API writes it."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class FunctionChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: ToolName

    def chat_choice(self) -> dict[str, Any]:
        """The same as the chat API writes it."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(Body):
    """The model is told of these functions only, of which it may call some, or must."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]

    def chat_choice(self) -> dict[str, Any]:
        """The same as the chat API writes it."""
        tools = [tool.chat_choice() for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


FunctionTools = Annotated[list[Annotated[FunctionTool, BeforeValidator(check_tool)]], Field(max_length=MAX_TOOLS)]
FunctionToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[FunctionChoice, Tag("<object>")]
    | Annotated[AllowedFunctions, Tag("<allowed>")],
    Discriminator(kind_of_choice),
]


# --- What they are to a chat template ---------------------------------------------------------


def chat_messages(items: list[InputItem]) -> list[dict[str, Any]]:
    """The messages that the chat API would have. Calls belong to the assistant's turn that they follow."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": _content(item.content)})
        elif isinstance(item, InputFunctionResult):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"name": item.name, "arguments": item.arguments}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": call})
    return messages


def _content(content: InputContent) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def check_results(items: list[InputItem]) -> None:
    """Raises: FieldError for a result whose call is not among the items before it: nothing is stored here."""
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
