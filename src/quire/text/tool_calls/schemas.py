"""Tools of a request and their JSON Schemas: the values that texts without quotes stand for, objects without other
keys, a system prompt that describes tools, and a schema that forces calls.

Must not know formats but `GENERIC`, which can be described to any model. Next to read: `readers.py`, `formats.py`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire.errors import InvalidParameterError
from quire.text.tool_calls.lenient_json import WORDS, parse_json

# --- Values ---------------------------------------------------------------------------------------
# Models that write parameters between tags do not mark text: a value's type follows the tool's schema, not its looks.

MAX_LOOKED_AT = 16
"""References that are followed, and levels at which a value is compared with a schema."""
PREFIXES = ("functions.", "default_api.", "tools.")
"""Namespaces that models write before the name of a tool."""
_KINDS: dict[str, type] = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}


class ToolSchemas:
    """The tools that a model may call."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = ()) -> None:
        """`tools`: in the format of the chat API; None accepts any name, with any parameters."""
        functions = [tool["function"] for tool in tools or ()]
        self._parameters = {function["name"]: function.get("parameters") or {} for function in functions}
        self.names = None if tools is None else frozenset(self._parameters)

    def known(self, name: Any) -> str | None:
        """Return the name of the tool that a model means, which may have a prefix; None if there is none."""
        if not isinstance(name, str) or not name:
            return None
        if self.names is None:
            return name if _is_unicode(name) else None
        if name in self.names:
            return name
        bare = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
        return bare if bare in self.names else None

    def may_begin(self, name: str) -> bool:
        """Return True if the name of a tool may begin with `name`."""
        if self.names is None or any(prefix.startswith(name) for prefix in PREFIXES):
            return True
        bare = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
        return any(each.startswith((name, bare)) for each in self.names)

    def keys(self, name: str) -> list[str]:
        """Return the declared parameters of a tool, in order."""
        root = self._parameters.get(name, {})
        properties = _resolved(root, root).get("properties")
        return list(properties) if isinstance(properties, Mapping) else []

    def value(self, name: str, key: str, text: str) -> Any:
        """Return the JSON value of a parameter that a model wrote without quotes.

        It is the first that the parameter's schema allows, of: the value that the text has as JSON, the text, the value
        that it has as Python or as JSON with slips. Without a schema it is JSON if the text is JSON, else text.
        """
        root = self._parameters.get(name, {})
        schema = _parameter(root, key)
        value, is_json = parse_json(text)
        if text.strip() in WORDS:
            value, is_json = WORDS[text.strip()], True
        # A text with quotes around it may mean them; nothing else looks like text.
        comes_first = is_json and (not isinstance(value, str) or schema in (True, {}))
        choices = (value, text) if comes_first else (text, value)
        return next((choice for choice in choices if _allows(schema, choice, root, 0)), choices[0])


def _is_unicode(text: str) -> bool:
    """Return False for halves of surrogate pairs, which JSON can name and UTF-8 cannot encode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _parameter(root: Any, key: str) -> Any:
    """Return the schema of a parameter; True if there is none."""
    found = _resolved(root, root)
    parts = found.get("allOf")
    for schema in (found, *(_resolved(part, root) for part in (parts if isinstance(parts, list) else ()))):
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
    return found.get("additionalProperties") or True


def _resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return a schema, or the schema that it refers to; empty if there is none."""
    for _ in range(MAX_LOOKED_AT):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = root
        for step in reference[1:].split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _allows(schema: Any, value: Any, root: Any, depth: int) -> bool:
    """Return True if a schema allows a value, as far as types, listed values and combinations of schemas tell."""
    schema = _resolved(schema, root)
    if depth > MAX_LOOKED_AT or (value is None and schema.get("nullable") is True):
        return True
    kinds, values = schema.get("type"), schema.get("enum")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and not any(_is_kind(value, kind) for kind in kinds):
        return False
    if isinstance(values, list) and not any(_is_same(value, each) for each in values):
        return False
    if "const" in schema and not _is_same(value, schema["const"]):
        return False
    for keyword, needed in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(keyword)
        if isinstance(parts, list) and parts and not needed(_allows(part, value, root, depth + 1) for part in parts):
            return False
    return True


def _is_kind(value: Any, kind: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer":
        return is_number and (isinstance(value, int) or value.is_integer())
    return is_number if kind == "number" else isinstance(value, _KINDS.get(str(kind), object))


def _is_same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


# --- Objects without keys but those that they declare ---------------------------------------------
# Without this a model may add keys up to the length limit, or leave out each declared one for keys of its own.

MAX_DEPTH = 64
OPEN_KEYS = frozenset({
    "$dynamicRef", "$ref", "additionalProperties", "allOf", "anyOf", "const", "dependentSchemas", "enum", "if",
    "minProperties", "not", "oneOf", "patternProperties", "propertyNames", "unevaluatedProperties",
})  # fmt: skip
"""Keywords with which an object may have keys that `properties` does not declare."""
_COMBINING = frozenset({"$dynamicRef", "allOf", "dependentSchemas", "if", "not", "patternProperties"})
"""Keywords with schemas for a value, or for its parts, that other keywords describe too."""
_DESCRIBING = frozenset({"additionalProperties", "items", "prefixItems", "properties", "required"})
_CHOICES = ("anyOf", "oneOf")
_PARTS = ("additionalProperties", "items", "prefixItems", "properties")
_DEFINITIONS = ("$defs", "definitions")


def closed(schema: Any, closes: Callable[[Mapping[str, Any]], bool]) -> Any:
    """Return the schema with `additionalProperties: false` in objects of which `closes` is true.

    Objects stay open if they allow other keys explicitly, and if several schemas describe them (`allOf`, `$ref` with
    keywords beside it …), because each of these lists only some of the keys.
    """
    alone: Counter[str] = Counter()

    def count(part: dict[str, Any]) -> dict[str, Any]:
        if isinstance(part.get("$ref"), str) and _DESCRIBING.isdisjoint(part):
            alone[part["$ref"]] += 1
        return part

    def close(part: dict[str, Any]) -> dict[str, Any]:
        types = part.get("type", "object")
        is_object = types == "object" or (isinstance(types, list) and "object" in types)
        if not is_object or not OPEN_KEYS.isdisjoint(part) or not closes(part):
            return part
        return {"type": "object", **part, "additionalProperties": False}

    _walked(schema, count, frozenset())
    combined = {reference for reference, times in Counter(_references(schema)).items() if times > alone[reference]}
    places = {f"#/{key}/{name}" for key in _DEFINITIONS for name in _definitions(schema, key)}
    return _walked(schema, close, frozenset(combined)) if combined <= places else schema


def _walked(
    schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], left_out: frozenset[str], depth: int = 0
) -> Any:
    """Return the schema with `change` applied to each schema that alone describes its values."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema
    walked = dict(schema)
    for key in _DEFINITIONS if depth == 0 else ():
        for name, inner in _definitions(schema, key).items():
            if f"#/{key}/{name}" not in left_out:
                walked[key] = {**walked[key], name: _walked(inner, change, left_out, depth + 1)}
    if "$ref" in schema or not _COMBINING.isdisjoint(schema):
        return change(walked)
    has_choices = not set(_CHOICES).isdisjoint(schema)
    if has_choices and not _DESCRIBING.isdisjoint(schema):
        return change(walked)
    for key in _CHOICES if has_choices else _PARTS:
        inner = schema.get(key)
        if isinstance(inner, list):
            walked[key] = [_walked(item, change, left_out, depth + 1) for item in inner]
        elif key == "properties" and isinstance(inner, Mapping):
            walked[key] = {name: _walked(item, change, left_out, depth + 1) for name, item in inner.items()}
        elif isinstance(inner, Mapping):
            walked[key] = _walked(inner, change, left_out, depth + 1)
    return change(walked)


def _definitions(schema: Any, key: str) -> Mapping[str, Any]:
    found = schema.get(key) if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _references(schema: Any) -> Iterator[str]:
    """Yield the references anywhere in a schema."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


# --- `tools` and `tool_choice` --------------------------------------------------------------------

MAX_PARALLEL_CALLS = 16
"""Most calls of a forced list: without a limit a model may repeat calls up to `max_tokens`."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_VALUE_KEYS = frozenset({"const", "enum", "default", "examples"})
"""Keywords with values that are no schemas."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with a mapping from names to schemas; the names are no keywords."""

Tools = Sequence[Mapping[str, Any]]
ToolChoice = str | Mapping[str, Any] | None


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
