"""Objects that get `additionalProperties: false`, and those that stay open."""

from typing import Any

import pytest

from quire.text.tool_calls.schemas import closed

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**A, "additionalProperties": False}
OTHER = {"properties": {"b": {}}}
REF = {"$ref": "#/$defs/A"}


def close(schema: Any) -> Any:
    return closed(schema, lambda part: bool(part.get("properties")))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}, "additionalProperties": False}),
        ({**A, "type": ["object", "null"]}, {**CLOSED, "type": ["object", "null"]}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [A, True]}, {"prefixItems": [CLOSED, True]}),
        ({"type": "object", "additionalProperties": A}, {"type": "object", "additionalProperties": CLOSED}),
        ({"anyOf": [A, {"type": "null"}], "title": "T"}, {"anyOf": [CLOSED, {"type": "null"}], "title": "T"}),
        ({"properties": {"": A}, "additionalProperties": {}}, {"properties": {"": CLOSED}, "additionalProperties": {}}),
        ({**REF, "$defs": {"A": A}}, {**REF, "$defs": {"A": CLOSED}}),
        ({"items": {**REF, "title": "T"}, "definitions": {}, "$defs": {"A": A}},
         {"items": {**REF, "title": "T"}, "definitions": {}, "$defs": {"A": CLOSED}}),
    ],
)  # fmt: skip
def test_object_whose_keys_one_schema_lists_is_closed(schema: Any, expected: Any) -> None:
    assert close(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "string", "properties": {"a": {}}},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "minProperties": 1},
        {"allOf": [A, OTHER]},
        {**A, "anyOf": [{"required": ["a"]}, OTHER]},
        {**A, "$ref": "#/$defs/B", "$defs": {"B": OTHER}},
        {"items": {"allOf": [REF, OTHER]}, "$defs": {"A": A}},
        {"items": {**REF, "required": ["b"]}, "$defs": {"A": A}},
        {"properties": {"x": {"allOf": [{"$ref": "#"}, OTHER]}}},
        {"items": REF, "contains": {"allOf": [{"$ref": "#name"}]}, "$defs": {"A": {**A, "$anchor": "name"}}},
        True, 3, [A], None, {"properties": 3, "type": 5, "items": 3, "$defs": [], "anyOf": 3},
    ],
)  # fmt: skip
def test_other_schemas_stay_as_they_are(schema: Any) -> None:
    assert close(schema) == schema


def test_definition_used_alone_is_closed_beside_one_that_is_combined() -> None:
    schema = {"prefixItems": [REF, {"allOf": [{"$ref": "#/$defs/B"}, A]}], "$defs": {"A": A, "B": OTHER}}
    assert close(schema) == {**schema, "$defs": {"A": CLOSED, "B": OTHER}}


def test_predicate_decides_and_nothing_is_changed_in_place() -> None:
    schema = {"properties": {"x": {**A, "required": ["a"]}, "y": A}}
    before = repr(schema)
    found = closed(schema, lambda part: bool(part.get("properties")) and "required" not in part)
    assert found["properties"] == {"x": {**A, "required": ["a"]}, "y": CLOSED}
    assert found["additionalProperties"] is False
    assert repr(schema) == before


def test_deep_schema_stays_open_inside() -> None:
    schema = A
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    assert close(schema)["type"] == "array"
