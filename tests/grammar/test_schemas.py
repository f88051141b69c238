"""Schemas that are rewritten for llguidance, or refused."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.grammar.schemas import UnenforceableError, enforceable
from tests.grammar.random_schemas import accepts, grammar_of

WIDE = {"type": "object", "minProperties": 2}


def tagged(tag: Any, *, required: bool = False, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"kind": tag, **properties}, "additionalProperties": False}
    return {**schema, "required": ["kind"]} if required else schema


REFERENCES = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]
A, B = tagged({"const": "a"}, x={"type": "integer"}), tagged({"enum": ["b", "c"]}, y={"oneOf": REFERENCES})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]}, [1, "a", None], [1.5, True]),
        ({"oneOf": [{"const": 1}, {"enum": [2, "1"]}]}, [1, 2, "1"], [3]),
        ({"oneOf": [A, tagged({"const": "b"})]}, [{"kind": "a", "x": 1}, {"kind": "b"}],
         [{}, {"x": 1}, {"kind": "b", "x": 1}]),
        ({"oneOf": [tagged({"const": "a"}), tagged({"const": "b"}, required=True)],
          "discriminator": {"propertyName": "kind"}}, [{"kind": "a"}, {"kind": "b"}], [{}]),
        ({"oneOf": [tagged({"const": "a"}, x={"type": "null"}), tagged({"const": "b"}, x={"type": "integer"})]},
         [{"kind": "a"}, {"kind": "b", "x": 1}], [{}, {"x": 1}]),
        ({"oneOf": REFERENCES, "$defs": {"A": A, "B": B}},
         [{"kind": "a", "x": 1}, {"kind": "c", "y": {"kind": "b"}}, {"kind": "b", "y": {"kind": "a", "x": 2}}],
         [{}, {"x": 1}, {"kind": "c", "y": {}}, {"kind": "c", "x": 1}]),
        ({"oneOf": [{"$ref": "#/$defs/A"}, tagged({"const": "b"}, required=True)], "$defs": {"A": A}},
         [{"kind": "a"}, {"kind": "b"}, {"x": 1}, {}], [{"kind": "b", "x": 1}]),
        ({"oneOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
                    {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False}]},
         [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
        ({"anyOf": [{"minimum": 3}, {"type": "string"}], "oneOf": [{"type": "integer"}, {"type": "string"}]},
         [3, "a"], [2]),
        ({"oneOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"allOf": [{"enum": [3, 4]}]}]}, [1, 4], [5]),
    ],
)  # fmt: skip
def test_one_of_members_that_exclude_each_other_are_enforced(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    validator = Draft202012Validator(schema)
    assert all(validator.is_valid(value) and accepts(schema, value) for value in good)
    assert not any(accepts(schema, value) for value in bad)


@pytest.mark.parametrize(
    "members",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"const": "a"}, {"type": "string"}],
        [{"properties": {"kind": {"const": "a"}}}, {"properties": {"kind": {"const": "b"}}}],
        [tagged({"const": "a"}), tagged({"enum": ["b", "a"]})],
        [{"type": "object"}, True],
    ],
)
def test_one_of_members_with_a_value_in_common_are_refused(members: list[Any]) -> None:
    assert "oneOf" in grammar_of({"oneOf": members})["error"]


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        ({"enum": ["a", "b"]}, [{}, {"a": 1, "b": 2}, {"b": 1}], [{"c": 1}, {"a": "x"}]),
        ({"$ref": "#/$defs/Name"}, [{"a": 1}], [{"c": 1}]),
        ({"const": "a"}, [{"a": 1}], [{"b": 1}]),
        ({"format": "date"}, [{"2024-02-29": 1}], [{"2023-02-29": 1}, {"a": 1}]),
        ({"format": "password", "title": "T"}, [{"a": 1}], [{"a": "x"}]),
        ({"minLength": 2, "maxLength": 3}, [{"ab": 1, "cde": 2}], [{"a": 1}, {"abcd": 1}]),
        ({"minLength": 2}, [{"ab": 1}], [{"a": 1}]),
        ({"pattern": "^x"}, [{"x1": 1}], [{"y": 1}, {"x": "a"}]),
        ({"type": "string"}, [{"anything": 1}], [{"a": "x"}]),
        (True, [{"anything": 1}], [{"a": "x"}]),
    ],
)
def test_names_of_a_map_are_enforced(names: Any, good: list[Any], bad: list[Any]) -> None:
    schema = {
        "type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"},
        "$defs": {"Name": {"title": "Name", "type": "string", "enum": ["a", "b"]}},
    }  # fmt: skip
    assert all(accepts(schema, value) for value in good)
    assert not any(accepts(schema, value) for value in bad)


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"pattern": "^a", "minLength": 3}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        {"propertyNames": {"not": {}}},
        {"uniqueItems": True},
        {"not": {"type": "string"}},
        {"contains": {}},
        {"if": {}},
        {"x-guidance": {"lenient": True}},
    ],
)
def test_schema_that_is_not_enforced_is_refused(schema: dict[str, Any]) -> None:
    assert "error" in grammar_of(schema)


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        ({"minProperties": 1}, False),
        ({"properties": {"minProperties": {"type": "integer"}}}, False),
        ({"const": {"minProperties": 2}}, False),
        (True, False),
        ({"minProperties": 2, "required": ["a", "b"]}, True),
        ({"minProperties": 2.5}, True),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": WIDE}}, True),
        ({"$ref": "#/x-own/1", "x-own": [{}, WIDE]}, True),
        ({"$ref": "#name", "$defs": {"d": {"$anchor": "name", **WIDE}}}, True),
        ({"allOf": [{"minProperties": 3}, {"required": ["a"]}]}, True),
    ],
)
def test_min_properties_above_1_is_refused_wherever_it_is(schema: Any, is_refused: bool) -> None:
    if not is_refused:
        enforceable(schema)
        return
    with pytest.raises(UnenforceableError, match="minProperties above 1"):
        enforceable(schema)


NODE: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}


@pytest.mark.parametrize(
    ("schema", "definition", "is_refused"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {}, True),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, {}, True),
        ({"$ref": "#/$defs/Node"}, {**NODE, "required": ["next"]}, True),
        ({"anyOf": [{"$ref": "#/$defs/Node"}]}, {"allOf": [{**NODE, "required": ["next"]}]}, True),
        ({"additionalProperties": {"$ref": "#"}, "type": "object", "minProperties": 1}, {}, True),
        ({"additionalProperties": {"$ref": "#"}, "type": "object", "minProperties": 0}, {}, False),
        ({"$ref": "#/$defs/Node"}, NODE, False),
        ({"$ref": "#/$defs/Node"}, {"anyOf": [{"type": "null"}, {**NODE, "required": ["next"]}]}, False),
        ({"type": "array", "items": {"$ref": "#"}}, {}, False),
    ],
)
def test_schema_that_requires_itself_is_refused(schema: Any, definition: Any, is_refused: bool) -> None:
    answer = grammar_of({**schema, "$defs": {"Node": definition}})
    assert ("without end" in answer.get("error", "")) is is_refused
    assert ("grammar" in answer) is not is_refused


def test_optional_part_that_requires_itself_is_left_out() -> None:
    endless = {"$ref": "#/$defs/D"}
    definition = {"type": "array", "items": endless, "minItems": 1}
    schema = {"properties": {"a": endless, "b": {}}, "additionalProperties": endless, "$defs": {"D": definition}}
    assert accepts(schema, {"b": 1})
    assert not accepts(schema, {"a": []})
    assert not accepts(schema, {"c": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"$defs": {"A": {"anyOf": [{}, {"$ref": "#/$defs/B"}]}, "B": {"allOf": [{"$ref": "#/$defs/A"}]}}},
    ],
)
def test_reference_that_leads_back_for_the_same_value_is_refused(schema: Any) -> None:
    assert "leads back to itself" in grammar_of(schema)["error"]


def test_recursive_reference_may_have_remarks_beside_it() -> None:
    child = {
        "anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}],
        "default": None,
        "deprecated": True,
        "title": "Child",
    }
    schema = {"$ref": "#/$defs/Node", "$defs": {"Node": {"type": "object", "properties": {"child": child}}}}
    assert accepts(schema, {"child": {"child": None}})


def test_bounds_beyond_64_bits_are_narrowed_or_refused() -> None:
    for schema in ({"minimum": -(2**63), "maximum": 2**64 - 1}, {"exclusiveMaximum": 1e300}, {"minimum": -1e19}):
        for kind in ("integer", "number"):
            assert accepts({"type": kind, **schema}, -7 if "exclusiveMaximum" in schema else 7)
    assert "minimum beyond" in grammar_of({"type": "integer", "minimum": 2**63})["error"]


def test_malformed_schema_is_refused_with_the_keyword() -> None:
    for schema in ({"required": True}, {"properties": []}, {"anyOf": 3}, {"type": 5}, {"enum": 3}, {"oneOf": [3, 4]}):
        reason = grammar_of(schema)["error"]
        assert any(name in reason for name in ("required", "properties", "anyOf", "type", "enum", "schema")), reason
    assert "'required'" in grammar_of({"oneOf": [{"type": "object", "required": 3}, {"type": "object"}]})["error"]


def test_remarks_and_unknown_formats_constrain_nothing() -> None:
    remarks = {"title": "T", "deprecated": True, "format": "password", "writeOnly": True, "contentMediaType": "a/b"}
    assert accepts({"type": "string", **remarks}, "any")
    assert accepts(
        {"type": "object", "properties": {"format": {"type": "string"}, "title": {"const": 1}}}, {"format": "x"}
    )
