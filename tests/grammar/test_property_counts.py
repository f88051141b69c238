"""Counts of properties taken together, held to the library, which must keep what passes; jsonschema is the judge."""

import itertools
import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest
from llguidance import LLMatcher

from quire.grammar.check_child import ByteTokens, define
from quire.grammar.property_counts import MAX_WAYS, Count, counts_of_each, counts_of_places
from quire.grammar.schema_rules import unenforceable

OBJECTS = ["{" + ",".join(f'"{name}":1' for name in names) + "}"
           for number in range(5) for names in itertools.product("abxy", repeat=number)]  # fmt: skip
"""All objects of up to four of these names, in any order, twice and more too."""


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), eos_token=[256])


def accepted(tokenizer: llguidance.LLTokenizer, schema: Any) -> list[str] | None:
    """Of `OBJECTS`, those that the library takes for this schema; None if it refuses the schema."""
    matcher = LLMatcher(tokenizer, define("json", json.dumps(schema), {}), log_level=0)
    if matcher.is_error():
        return None
    found = []
    for text in OBJECTS:
        matcher.reset()
        if matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting():
            found.append(text)
    return found


def broken(schema: Any, texts: list[str]) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema)
    return [text for text in texts if not validator.is_valid(json.loads(text))]


BOTH = {"type": "object", "required": ["b"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "object", "minProperties": 2}, {"required": ["a"]}]},
        {"allOf": [{"type": "object", "minProperties": 3}, {"required": ["a"]}, {"required": ["b"]}]},
        {"type": "object", "required": ["a"], "allOf": [{"allOf": [{"minProperties": 2}]}]},
        {"minProperties": 3, "required": ["a"], "$ref": "#/$defs/d", "$defs": {"d": BOTH}},
        {"type": "object", "minProperties": 2, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ],
)  # fmt: skip
def test_counts_and_names_of_several_schemas_go_together(tokenizer: llguidance.LLTokenizer, schema: Any) -> None:
    assert unenforceable(json.dumps(schema)) is None
    texts = accepted(tokenizer, schema)
    assert texts
    assert not broken(schema, texts)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "object", "minProperties": 3}, {"required": ["a"]}]},
        {"allOf": [{"minProperties": 3, "required": ["a", "b"]}, {"minProperties": 4}], "type": "object"},
        {"type": "object", "minProperties": 2, "anyOf": [{"required": ["a"]}, {"maxProperties": 9}]},
        {"anyOf": [{"type": "null"}, {"allOf": [{"type": "object"}, {"minProperties": 2}]}]},
        {"type": "object", "minProperties": 2, "allOf": [{"$ref": "#"}]},
    ],
)
def test_too_many_of_several_schemas_are_refused(tokenizer: llguidance.LLTokenizer, schema: Any) -> None:
    assert "minProperties" in str(unenforceable(json.dumps(schema)))
    texts = accepted(tokenizer, schema)
    if texts is not None:  # of the circle the library itself says that it has none
        assert broken(schema, texts), "without the rule an answer would break its schema"


def some_schema(random_numbers: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    chance = random_numbers.random
    if chance() < 0.7:
        schema["type"] = random_numbers.choice(["object", "object", "object", ["object", "null"], "null"])
    if chance() < 0.5:
        schema["minProperties"] = random_numbers.randrange(4)
    if chance() < 0.5:
        schema["required"] = random_numbers.sample(["a", "b"], random_numbers.randrange(1, 3))
    if chance() < 0.2:
        schema |= {"properties": {"a": {}, "b": {}}, "additionalProperties": False}
    if depth:
        for word, share in (("allOf", 0.5), ("anyOf", 0.4)):
            if chance() < share:
                members = random_numbers.randrange(1, 3)
                schema[word] = [some_schema(random_numbers, depth - 1) for _ in range(members)]
        if chance() < 0.2:
            schema["$ref"] = "#/$defs/d"
    return schema


def test_exactly_those_are_refused_whose_answers_could_break_them(tokenizer: llguidance.LLTokenizer) -> None:
    random_numbers = random.Random(0)
    num_refused = num_taken = 0
    for _ in range(150):
        schema = {**some_schema(random_numbers, 2), "$defs": {"d": some_schema(random_numbers, 0)}}
        texts = accepted(tokenizer, schema)
        if texts is None:
            continue
        is_refused = unenforceable(json.dumps(schema)) is not None
        assert bool(broken(schema, texts)) == is_refused, schema
        num_refused += is_refused
        num_taken += not is_refused
    assert num_refused > 1
    assert num_taken > 60


def test_counts_of_unknown_relations_are_each_schemas_own() -> None:
    schema = {"minProperties": 2, "allOf": [{"required": ["a"]}]}
    assert list(counts_of_each([schema, {"type": "null"}])) == [Count(2)]
    assert set(counts_of_places(schema)) == {Count(2, frozenset("a"))}


def test_parts_of_a_value_are_counted_by_themselves() -> None:
    inner = {"type": "object", "minProperties": 1}
    schema = {"type": "object", "minProperties": 2, "required": ["p"], "properties": {"p": inner}, "items": True}
    assert set(counts_of_places(schema)) == {Count(2, frozenset("p")), Count(1)}


def test_the_first_other_key_may_be_a_name_where_names_have_several_spellings() -> None:
    assert [Count(names=frozenset(names)).most(has_one_spelling=True) for names in ("", "ab")] == [1, 3]
    assert [Count(names=frozenset(names)).most(has_one_spelling=False) for names in ("", "ab")] == [1, 2]


def test_very_many_ways_are_taken_for_the_worst() -> None:
    names = [f"n{index}" for index in range(MAX_WAYS + 1)]
    schema = {"type": "object", "minProperties": 2, "anyOf": [{"required": [name]} for name in names]}
    assert set(counts_of_places(schema)) == {Count(2)}
    schema["anyOf"] = [{"required": ["z", name]} for name in names]
    assert set(counts_of_places(schema)) == {Count(2, frozenset("z"))}
