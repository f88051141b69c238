"""Tools of `/v1/responses`: functions, which are flat in this API, alone and in namespaces; and their conversion.

The model sees a function of a namespace under a name of both; a call and its replay have the two names apart.
Next to read: `tools.py`, `responses.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.server.protocol.fields import Body
from quire.server.protocol.tools import (
    MAX_TOOLS,
    AllowedNames,
    AllowedTools,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    ToolHints,
    ToolName,
    kind_of_choice,
)


class FunctionTool(FunctionDefinition):
    """A function; `parameters` is the JSON Schema of its arguments."""

    type: Literal["function"]


class NamespaceTool(ToolHints):
    """Functions of one source, such as a server of tools."""

    type: Literal["namespace"]
    name: ToolName
    description: Annotated[str, Field(max_length=16384)] | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS)]


class FunctionChoice(Body):
    """The function that the answer must call."""

    type: Literal["function"]
    name: ToolName


class AllowedFunctions(Body):
    """The only functions that the prompt describes: the model may call one (`auto`), or must (`required`)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<namespace>" if kind == "namespace" else "<function>"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[NamespaceTool, Tag("<namespace>")],
    Discriminator(_kind_of_tool),
]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)]
FunctionToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[FunctionChoice, Tag("<object>")]
    | Annotated[AllowedFunctions, Tag("<allowed>")],
    Discriminator(kind_of_choice),
]


# --- Conversion to the chat API ---------------------------------------------------------------


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name that the model reads and writes."""
    return f"{namespace}__{name}" if namespace else name


def namespaces(tools: list[ResponseTool] | None) -> dict[str, tuple[str, str]]:
    """Return the functions of namespaces: the name that the model writes → namespace and name."""
    groups = [tool for tool in tools or () if isinstance(tool, NamespaceTool)]
    return {joined_name(group.name, tool.name): (group.name, tool.name) for group in groups for tool in group.tools}


def chat_tools(tools: list[ResponseTool] | None) -> list[Tool] | None:
    """Return the same tools as the chat API's. The description of a namespace is before that of its first function."""
    if tools is None:
        return None
    found: list[FunctionDefinition] = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            found.append(tool)
            continue
        functions = [each.model_copy(update={"name": joined_name(tool.name, each.name)}) for each in tool.tools]
        if tool.description:
            functions[0].description = f"{tool.description}\n\n{functions[0].description or ''}".rstrip()
        found += functions
    return [Tool(type="function", function=function) for function in found]


def chat_tool_choice(choice: FunctionToolChoice | None) -> ToolChoice | None:
    """Return the same choice as the chat API's."""
    if isinstance(choice, FunctionChoice):
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    if isinstance(choice, AllowedFunctions):
        named = [NamedTool(type="function", function=FunctionName(name=tool.name)) for tool in choice.tools]
        return AllowedTools(type="allowed_tools", allowed_tools=AllowedNames(mode=choice.mode, tools=named))
    return choice
