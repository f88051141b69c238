"""`tools` and `tool_choice` of a request: a system prompt that describes tools, and a schema that forces calls.

Both use the format `GENERIC`, which can be described to any model. Next to read: `formats.py`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidParameterError
from quire.text.tool_calls.closed_objects import OPEN_KEYS, closed

MAX_PARALLEL_CALLS = 16
"""Most calls of a forced list: without a limit a model may repeat calls up to `max_tokens`."""
MAX_DEPTH = 64
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_VALUE_KEYS = frozenset({"const", "enum", "default", "examples"})
"""Keywords with values that are no schemas."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with a mapping from names to schemas; the names are no keywords."""

Tools = Sequence[Mapping[str, Any]]
ToolChoice = str | Mapping[str, Any] | None


def tool_names(tools: Tools) -> list[str]:
    """Return the names of OpenAI's `tools`, in order. Raises: InvalidParameterError."""
    return [function["name"] for function in _functions(tools)]


def text_parameters(tools: Tools) -> dict[str, frozenset[str]]:
    """Return by tool the parameters that are declared as text. Raises: InvalidParameterError."""
    found = {}
    for function in _functions(tools):
        properties = function["parameters"].get("properties")
        declared = properties.items() if isinstance(properties, Mapping) else ()
        texts = [name for name, schema in declared if isinstance(schema, Mapping) and schema.get("type") == "string"]
        found[function["name"]] = frozenset(texts)
    return found


def tools_system_prompt(tools: Tools, example: str = "") -> str:
    """Return the system message that describes tools, for a chat template without tools.

    `example`: of a call in the model's own format; without it calls are in the format `GENERIC`.
    Raises: InvalidParameterError.
    """
    lines = [
        "You can call these functions, given as JSON with the schema of their arguments:",
        *(json.dumps(_described(function), ensure_ascii=False) for function in _functions(tools)),
        "",
    ]
    if example:
        lines += [
            "To call one or several, end the answer with their names and arguments, exactly in this form:",
            example,
        ]
    else:
        lines += [
            "To call one, answer with nothing but a JSON object with its name and its arguments:",
            '{"name": "<function>", "arguments": {"<argument>": "<value>"}}',
            "To call several at once, answer with a list of such objects. If no function helps, answer in plain text.",
        ]
    return "\n".join(lines)


def tool_choice_schema(
    tools: Tools, tool_choice: ToolChoice, *, parallel_tool_calls: bool = True
) -> dict[str, Any] | None:
    """Return the JSON Schema of the calls that `tool_choice` demands; None if it demands none.

    "required" is a list of 1 to 16 calls, or one call as an object with `parallel_tool_calls=False`. A function's name,
    `{"type": "function", "function": {"name": …}}`, is one call of it as an object. "none", "auto" and None demand
    nothing. Arguments follow the function's `parameters`, with no other keys unless these allow them explicitly. Parse
    the calls with the format `GENERIC`.

    Raises: InvalidParameterError for other values, unknown names and malformed tools.
    """
    functions = _functions(tools)
    if tool_choice in (None, "none", "auto"):
        return None
    is_list = False
    if isinstance(tool_choice, Mapping):
        functions = [_chosen(functions, tool_choice)]
    elif tool_choice == "required":
        is_list = parallel_tool_calls
        if not functions:
            raise InvalidParameterError("tool_choice", tool_choice, "'none' or 'auto' without tools")
    else:
        limit = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}"
        raise InvalidParameterError("tool_choice", tool_choice, limit)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": call, "minItems": 1, "maxItems": MAX_PARALLEL_CALLS} if is_list else call
    # Each function's schema is a definition; its references to itself are moved along.
    definitions = {
        str(index): _moved(_closed(function["parameters"]), f"#/$defs/{index}")
        for index, function in enumerate(functions)
    }
    return {**schema, "$defs": definitions}


def _functions(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise InvalidParameterError("tools", tools, "a list of tools")
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise InvalidParameterError(f"tools[{index}]", tool, "{'type': 'function', 'function': {'name': …}}")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise InvalidParameterError(f"tools[{index}].function.name", name, "a non-empty string")
        if any(name == other["name"] for other in found):
            raise InvalidParameterError(f"tools[{index}].function.name", name, "a name that no other tool has")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidParameterError(f"tools[{index}].function.parameters", parameters, "a JSON Schema")
        found.append({**function, "parameters": parameters or _NO_ARGUMENTS})
    return found


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    return {key: function[key] for key in ("name", "description", "parameters") if function.get(key)}


def _chosen(functions: list[dict[str, Any]], tool_choice: Mapping[str, Any]) -> dict[str, Any]:
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    for known in functions:
        if known["name"] == name:
            return known
    names = ", ".join(repr(known["name"]) for known in functions) or "no function: there are no tools"
    raise InvalidParameterError("tool_choice", name, f"the name of one of the tools ({names})")


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of arguments with no other keys than it lists, unless it allows them explicitly."""
    if not parameters.get("properties") and OPEN_KEYS.isdisjoint(parameters):
        return {"type": "object", **parameters, "additionalProperties": False}
    closed_parameters: Mapping[str, Any] = closed(parameters, lambda part: bool(part.get("properties")))
    return closed_parameters


def _moved(schema: Any, base: str, depth: int = 0) -> Any:
    """Return the schema with its references to itself moved to its new place: `#/x` becomes `base/x`."""
    if depth > MAX_DEPTH:
        raise InvalidParameterError("tools", "a schema", f"nested at most {MAX_DEPTH} levels deep")
    if isinstance(schema, list | tuple):
        return [_moved(item, base, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = base + value[1:]
        elif key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            moved[key] = {name: _moved(item, base, depth + 2) for name, item in value.items()}
        else:
            moved[key] = value if key in _VALUE_KEYS else _moved(value, base, depth + 1)
    return moved
