"""What of a JSON Schema the library would take and not keep: the answer would break its schema, or never be complete.

Must not know the library. Next to read: `check_child.py`, which asks after the library has taken the schema.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("additionalProperties", "items", "additionalItems", "contains")


def unenforceable(text: str) -> str | None:
    """Why a schema that the library takes cannot be enforced; None if it can."""
    root = json.loads(text)
    is_elsewhere = _refers_elsewhere(root)
    schemas = list(_objects(root)) if is_elsewhere else _reachable(root)
    for schema in schemas:
        reason = _too_many_properties(schema)
        if reason is not None:
            return reason
    return None if is_elsewhere else _endless(root, schemas)


def _too_many_properties(schema: dict[str, Any]) -> str | None:
    """Keys that are not named may come twice, and count once: only the first of them is sure to be another one."""
    least, types = schema.get("minProperties"), schema.get("type", "object")
    if not isinstance(least, int) or (types != "object" and "object" not in _items(types)):
        return None
    most = len(set(map(str, _items(schema.get("required"))))) + 1
    if least <= most:
        return None
    return (
        f"minProperties may be at most {most} here, one more than there are names in `required`, and is {least}: "
        "other keys cannot be kept different from each other; name more of them in `required`"
    )


def _endless(root: Any, schemas: list["dict[str, Any]"]) -> str | None:
    """A schema that only JSON without end matches. Its beginning could be written, and then nothing more."""
    waiting = schemas[::-1]  # what is used comes after its user, mostly: one round does
    ended: set[int] = set()
    while True:
        left = [schema for schema in waiting if not _can_end(schema, root, ended)]
        if len(left) == len(waiting):
            break
        waiting = left
    if not waiting:
        return None
    shown = next((schema["$ref"] for schema in waiting if "$ref" in schema), "#")
    return f"no JSON of finite length matches what its $ref {json.dumps(shown)[:80]} requires"


def _can_end(schema: dict[str, Any], root: Any, ended: set[int]) -> bool:
    """Whether this is known to match something finite. Mutates: `ended`, ids of the schemas that are known to."""

    def ends(inner: Any) -> bool:
        return not isinstance(inner, dict) or id(inner) in ended

    needed = [*_items(schema.get("allOf"))]
    if "$ref" in schema:
        needed.append(_target(root, schema["$ref"]))
    if schema.get("type") == "object":
        properties = _values_by_name(schema.get("properties"))
        needed += [properties[name] for name in _items(schema.get("required")) if name in properties]
    if schema.get("type") == "array" and schema.get("minItems") and not schema.get("prefixItems"):
        needed.append(schema.get("items"))
    choices = [choice for word in ("anyOf", "oneOf") if (choice := _items(schema.get(word)))]
    if not all(map(ends, needed)) or not all(any(map(ends, choice)) for choice in choices):
        return False
    ended.add(id(schema))
    return True


def _reachable(root: Any) -> list["dict[str, Any]"]:
    """The schema and those that it uses, itself first."""
    found: dict[int, dict[str, Any]] = {}
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            waiting.extend(_used(schema, root))
    return list(found.values())


def _used(schema: dict[str, Any], root: Any) -> Iterator[Any]:
    for word in _MAPS:
        yield from _values_by_name(schema.get(word)).values()
    for word in _LISTS:
        yield from _items(schema.get(word))
    for word in _SINGLE:
        inner = schema.get(word)
        yield from inner if isinstance(inner, list) else (inner,)
    if "$ref" in schema:
        yield _target(root, schema["$ref"])


def _objects(root: Any) -> Iterator["dict[str, Any]"]:
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _refers_elsewhere(root: Any) -> bool:
    """Whether references may mean places that `_target` does not find: those by name, or below a name of their own."""
    for value in _objects(root):
        reference = value.get("$ref")
        if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
            return True
        if value is not root and any(isinstance(value.get(word), str) for word in ("$id", "id")):
            return True
    return False


def _target(root: Any, reference: Any) -> Any:
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


def _items(value: Any) -> "list[Any]":
    return value if isinstance(value, list) else []


def _values_by_name(value: Any) -> "dict[str, Any]":
    return value if isinstance(value, dict) else {}
