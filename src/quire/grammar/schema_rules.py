"""What of a JSON Schema the library would take and not keep: the answer would break its schema, or never be complete.

Must not know the library. Next to read: `property_counts.py`; `check_child.py`, which asks after the library has taken
the schema.
"""

import json
from typing import Any

from quire.grammar.property_counts import Count, counts_of_each, counts_of_places
from quire.grammar.schema_walk import CHOICES, items, objects, reachable, refers_elsewhere, target, values_by_name


def unenforceable(text: str, *, has_one_spelling: bool = True) -> str | None:
    """Why a schema that the library takes cannot be enforced; None if it can.

    has_one_spelling: whether every name in the answer is written in one way only, so that other keys are other names.
    """
    root = json.loads(text)
    is_elsewhere = refers_elsewhere(root)
    if "minProperties" in text or "\\u" in text:
        counts = counts_of_each(objects(root)) if is_elsewhere else counts_of_places(root)
        reasons = (_too_many_properties(count, has_one_spelling=has_one_spelling) for count in counts)
        if (reason := next(filter(None, reasons), None)) is not None:
            return reason
    return None if is_elsewhere else _endless(root, reachable(root))


def _too_many_properties(count: Count, *, has_one_spelling: bool) -> str | None:
    most = count.most(has_one_spelling=has_one_spelling)
    if count.least <= most:
        return None
    limit = "one more than" if most > len(count.names) else "as many as"
    return (
        f"minProperties may be at most {most} here, {limit} there are names in `required`, and is {count.least}: "
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

    needed = [*items(schema.get("allOf"))]
    if "$ref" in schema:
        needed.append(target(root, schema["$ref"]))
    if schema.get("type") == "object":
        properties = values_by_name(schema.get("properties"))
        needed += [properties[name] for name in items(schema.get("required")) if name in properties]
    if schema.get("type") == "array" and schema.get("minItems") and not schema.get("prefixItems"):
        needed.append(schema.get("items"))
    choices = [choice for word in CHOICES if (choice := items(schema.get(word)))]
    if not all(map(ends, needed)) or not all(any(map(ends, choice)) for choice in choices):
        return False
    ended.add(id(schema))
    return True
