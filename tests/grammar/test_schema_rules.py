import json
from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.grammar.compiler import GrammarCompiler, check_form
from quire.grammar.schema_rules import unenforceable
from quire.structured_outputs import StructuredOutputsParams
from tests.grammar.builders import accepts, make_vocabulary

NAMED = {"a": {}, "b": {}}
LOOP = {"d": {"$ref": "#/$defs/d"}}


def reason(schema: Any) -> str | None:
    return unenforceable(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 1},
        {"minProperties": 3, "required": ["a", "b"]},
        {"properties": NAMED, "required": ["a", "b"], "minProperties": 2},
        {"type": "string", "minProperties": 9},
        {"type": ["null", "integer"], "minProperties": 9},
        {"const": {"minProperties": 9}},
        {"enum": [{"minProperties": 9}]},
        {"default": {"minProperties": 9}, "examples": [{"minProperties": 9}]},
        {"properties": {"minProperties": {"type": "integer"}}},
        {"$defs": {"unused": {"minProperties": 9}}},
    ],
)
def test_what_is_counted_right_passes(schema: Any) -> None:
    assert reason(schema) is None


WIDE: dict[str, Any] = {"minProperties": 3, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        WIDE,
        {"minProperties": 2},
        {"type": ["object", "null"], "minProperties": 2},
        {"required": ["a", "a"], "minProperties": 3},
        {"properties": {"p": WIDE}},
        {"patternProperties": {"^p": WIDE}},
        {"additionalProperties": WIDE},
        {"items": WIDE},
        {"prefixItems": [{}, WIDE]},
        {"anyOf": [{"type": "null"}, WIDE]},
        {"allOf": [WIDE]},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": WIDE}},
        {"$ref": "#/x-own/1", "x-own": [{}, WIDE]},
        {"$ref": "#/const", "const": WIDE},
        {"$ref": "#name", "$defs": {"d": {"$anchor": "name", **WIDE}}},
        {"$ref": "other", "$defs": {"d": {"$id": "other", **WIDE}}},
    ],
)
def test_more_properties_than_names_are_refused(schema: Any) -> None:
    found = reason(schema)
    assert found is not None
    assert "minProperties may be at most" in found


def test_the_refusal_names_limit_value_and_next_step() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        check_form(StructuredOutputsParams(json={"type": "object", "properties": {}, "minProperties": 3}))
    assert caught.value.field == "structured_outputs.json"
    for part in ("at most 1 here", "and is 3", "name more of them in `required`"):
        assert part in str(caught.value)


def test_the_library_keeps_the_first_other_key_apart_from_the_required_ones() -> None:
    schema = {"properties": {"a": {}}, "required": ["a"], "minProperties": 2}
    compiled = GrammarCompiler(make_vocabulary).compile(StructuredOutputsParams(json=schema))
    assert not accepts(compiled.start(), '{"a":1,"a":1}')
    assert not accepts(compiled.start(), '{"a":1}')
    assert accepts(compiled.start(), '{"a":1,"b":1}')
    assert accepts(compiled.start(), '{"a":1,"b":1,"b":1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": LOOP},
        {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}], "$defs": LOOP},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#/$defs/d"}], "$defs": {"d": {"anyOf": [{"$ref": "#"}]}}},
    ],
)
def test_what_only_json_without_end_matches_is_refused(schema: Any) -> None:
    found = reason(schema)
    assert found is not None
    assert "finite length" in found


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/x"}}, "required": ["a"]},
        {"$ref": "#/$defs/missing"},
        {"$defs": LOOP},
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1800)}},
        {"$ref": 3},
    ],
)
def test_what_can_end_passes(schema: Any) -> None:
    assert reason(schema) is None


@pytest.mark.parametrize(
    "schema",
    [True, {"properties": [], "required": True, "anyOf": 3, "type": 5, "minProperties": 7}, {"required": [{}, []]}],
)
def test_what_is_no_schema_is_the_librarys_business(schema: Any) -> None:
    assert reason(schema) is None
