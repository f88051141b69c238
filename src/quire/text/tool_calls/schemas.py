"""`ToolSchemas`: names of the tools of a request, and the values that texts without quotes stand for.

Models that write parameters between tags do not mark text: a value's type follows the tool's JSON Schema, not its
looks. Must not know formats. Next to read: `readers.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.tool_calls.lenient_json import WORDS, parse_json

MAX_DEPTH = 16
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
    for _ in range(MAX_DEPTH):
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
    if depth > MAX_DEPTH or (value is None and schema.get("nullable") is True):
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
