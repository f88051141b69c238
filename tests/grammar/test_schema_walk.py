from typing import Any

import pytest

from quire.grammar.schema_walk import (  # fmt: skip
    inner_schemas,
    items,
    objects,
    reachable,
    refers_elsewhere,
    schemas_in_place,
    target,
    values_by_name,
)

A, B, C, D, E, F = ({"title": name} for name in "abcdef")


def test_parts_of_a_value_and_what_the_same_value_must_follow() -> None:
    schema = {"properties": {"a": A}, "patternProperties": {"b": B}, "prefixItems": [C], "items": D,
              "allOf": [E], "oneOf": [F], "$ref": "#/properties/a", "$defs": {"x": B}}  # fmt: skip
    assert [part for part in inner_schemas(schema) if part is not None] == [A, B, C, D]
    assert list(schemas_in_place(schema, schema)) == [F, E, A]
    assert [part for part in inner_schemas({"items": [A, B]}) if part is not None] == [A, B]


def test_reachable_is_what_is_used_once_each() -> None:
    root: dict[str, Any] = {"items": {"$ref": "#"}, "$defs": {"unused": A}, "anyOf": [True, B]}
    found = reachable(root)
    assert found[0] is root
    assert B in found
    assert A not in found
    assert len(found) == 3
    assert reachable(True) == []


def test_all_that_may_be_a_schema() -> None:
    assert list(objects([A, {"x": B}])) == [{"x": B}, B, A]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$ref": "#"}, False), ({"$ref": "#/a"}, False), ({"$id": "x", "items": {}}, False), ({"$ref": "#a"}, True),
        ({"$ref": "x"}, True), ({"items": {"$id": "x"}}, True), ({"items": {"id": {}}}, False),
    ],
)  # fmt: skip
def test_references_to_names(schema: Any, expected: bool) -> None:
    assert refers_elsewhere(schema) is expected


def test_targets() -> None:
    root = {"a/b": [A, B], "c d": {"~": C}}
    assert target(root, "#") is root
    assert target(root, "#/a~1b/1") is B
    assert target(root, "#/c%20d/~0") is C
    for reference in ("#/a~1b/2", "#/a~1b/x", "#/no", "#/a~1b/0/title/deeper", "x", 3):
        assert target(root, reference) is None


def test_what_has_another_form_is_nothing() -> None:
    assert (items("ab"), items([1])) == ([], [1])
    assert (values_by_name([]), values_by_name(A)) == ({}, A)
