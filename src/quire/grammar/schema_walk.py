"""A JSON Schema as a graph: which schemas it uses, and what its references mean.

What has not the form of a schema is passed over: the library judges that. Must not know what is refused.
Next to read: `schema_rules.py`.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_MAPS = ("properties", "patternProperties")
_SINGLE = ("additionalProperties", "items", "additionalItems", "contains")
CHOICES = ("anyOf", "oneOf")


def inner_schemas(schema: Schema) -> Iterator[Any]:
    """Those of the parts of a value: of an object's properties, an array's items."""
    for word in _MAPS:
        yield from values_by_name(schema.get(word)).values()
    yield from items(schema.get("prefixItems"))
    for word in _SINGLE:
        inner = schema.get(word)
        yield from inner if isinstance(inner, list) else (inner,)


def schemas_in_place(schema: Schema, root: Any) -> Iterator[Any]:
    """Those of the same value: what it must follow besides, or may choose from."""
    for word in (*CHOICES, "allOf"):
        yield from items(schema.get(word))
    if "$ref" in schema:
        yield target(root, schema["$ref"])


def reachable(root: Any) -> list[Schema]:
    """The schema and those that it uses, itself first."""
    found: dict[int, Schema] = {}
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            waiting.extend(inner_schemas(schema))
            waiting.extend(schemas_in_place(schema, root))
    return list(found.values())


def objects(root: Any) -> Iterator[Schema]:
    """All that may be a schema, wherever it stands."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def refers_elsewhere(root: Any) -> bool:
    """Whether references may mean places that `target` does not find: those by name, or below a name of their own."""
    for value in objects(root):
        reference = value.get("$ref")
        if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
            return True
        if value is not root and any(isinstance(value.get(word), str) for word in ("$id", "id")):
            return True
    return False


def target(root: Any, reference: Any) -> Any:
    """What a reference within the schema means (RFC 6901); None where it means nothing here."""
    if not isinstance(reference, str) or reference[:1] != "#":
        return None
    found = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def items(value: Any) -> list[Any]:
    """A list, or nothing."""
    return value if isinstance(value, list) else []


def values_by_name(value: Any) -> dict[str, Any]:
    """A JSON object, or nothing."""
    return value if isinstance(value, dict) else {}
