"""Random small schemas: jsonschema validates each text that random tokens make under a schema's constraint."""

import json
import random
from typing import Any

from jsonschema import Draft202012Validator

from quire.errors import InvalidParameterError
from tests.grammar.test_matcher import texts

NUM_SCHEMAS = 40
NAMES = ("a", "name", "größe", 'q"u', "n/o")


def some_schema(draws: random.Random, depth: int) -> dict[str, Any]:
    """Return a schema with supported keywords; every kind of value, few of each, so that answers are short."""
    leaves = [
        some_string,
        some_number,
        lambda _: {"enum": [1, "x", None, {"k": [True]}]},
        lambda _: {"type": "boolean"},
    ]
    if depth == 0:
        return draws.choice(leaves)(draws)
    kind = draws.choice(["object", "object", "array", "anyOf", "allOf", "leaf"])
    if kind == "leaf":
        return draws.choice(leaves)(draws)
    if kind == "anyOf":
        return {"anyOf": [some_schema(draws, depth - 1) for _ in range(2)]}
    if kind == "array":
        least = draws.randrange(2)
        return {"type": "array", "items": some_schema(draws, depth - 1), "minItems": least, "maxItems": least + 1}
    if kind == "allOf":
        return {"allOf": [some_object(draws, depth - 1), {"type": "object", "required": [draws.choice(NAMES)]}]}
    return some_object(draws, depth - 1)


def some_object(draws: random.Random, depth: int) -> dict[str, Any]:
    properties = {name: some_schema(draws, depth) for name in draws.sample(NAMES, draws.randrange(1, 4))}
    required = [name for name in properties if draws.random() < 0.6]
    schema = {"type": "object", "properties": properties, "required": required}
    if draws.random() < 0.7:
        return {**schema, "additionalProperties": False}
    return {
        **schema,
        "additionalProperties": some_schema(draws, 0),
        "minProperties": draws.randrange(2),
    }


def some_string(draws: random.Random) -> dict[str, Any]:
    return draws.choice(
        [{"maxLength": 6}, {"minLength": 2, "maxLength": 4}, {"pattern": "^[a-c]{1,3}$"}, {"format": "date"}]
    ) | {"type": "string"}


def some_number(draws: random.Random) -> dict[str, Any]:
    low = draws.randrange(-20, 20)
    bounds = {"minimum": low, draws.choice(["maximum", "exclusiveMaximum"]): low + draws.randrange(1, 300)}
    return {"type": draws.choice(["integer", "number"]), **(bounds if draws.random() < 0.7 else {})}


def test_finished_texts_follow_their_schemas() -> None:
    draws = random.Random(0)
    found: list[int] = []
    num_refused = 0
    while len(found) < NUM_SCHEMAS:
        schema = some_schema(draws, 3)
        try:
            finished = list(texts(len(found), 300, json=schema))
        except InvalidParameterError:
            num_refused += 1
            continue
        for text in finished:
            errors = [error.message for error in Draft202012Validator(schema).iter_errors(json.loads(text))]
            assert not errors, (errors, text, schema)
        found.append(len(finished))
    assert num_refused < NUM_SCHEMAS, "most are supported"
    assert sum(found) > 5 * NUM_SCHEMAS, found
