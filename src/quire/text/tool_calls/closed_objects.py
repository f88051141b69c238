"""`closed`: a JSON Schema whose objects have no keys but those that it declares.

Without this a model may add keys up to the length limit, or leave out each declared one for keys of its own.
Must not know: tools, requests. Next to read: `requests.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
