"""Random JSON Schemas, as people write them: mostly sensible, sometimes contradictory. Next to read: `schemas.py`."""

import random
from typing import Any

MAX_DEPTH = 4
NAMES = ("id", "name", "größe", "tags", "a b", "value", "items", "kind", "x-y", "$ref", "type", "0")
PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z][a-z]+$",
    "^\\d{3}-\\d{4}$",
    "^(red|green|blue)$",
    "^[^@ ]{1,9}@[a-z]{1,9}$",
    "^é?x*$",
)
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "uri", "hostname", "unknown")
CONSTANTS = ("a", "", "häh", 0, -3, 1.5, True, None, [1, "b"], {"k": None})


def make_schema(choices: random.Random) -> dict[str, Any]:
    """One schema; an object at its top, as requests have it."""
    schema = _object(choices, 0) if choices.random() < 0.6 else _any(choices, 0)
    if choices.random() < 0.25:
        schema["$defs"] = {"d": _any(choices, 2), "node": _node()}
    if choices.random() < 0.3:
        schema |= {"title": "T", "description": "what it is", "$schema": "https://json-schema.org/draft/2020-12/schema"}
    return schema


def _any(choices: random.Random, depth: int) -> dict[str, Any]:
    if depth >= MAX_DEPTH:
        return choices.choice(({"type": "boolean"}, {"type": "null"}, {"enum": ["x", 1]}, {"type": "integer"}))
    kinds = (_object, _object, _array, _string, _string, _number, _constant, _combined, _mixed, _reference, _odd)
    return choices.choice(kinds)(choices, depth)


def _object(choices: random.Random, depth: int) -> dict[str, Any]:
    names = choices.sample(NAMES, choices.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _any(choices, depth + 1) for name in names}}
    schema["required"] = names if choices.random() < 0.6 else choices.sample(names, choices.randint(0, len(names)))
    if choices.random() < 0.8:
        schema["additionalProperties"] = False if choices.random() < 0.8 else _any(choices, depth + 1)
    if choices.random() < 0.06:
        schema["patternProperties"] = {"^p_[a-z]{1,3}$": _any(choices, depth + 1)}
    if choices.random() < 0.06:
        schema[choices.choice(("minProperties", "maxProperties"))] = choices.randint(0, 4)
    return schema


def _array(choices: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _any(choices, depth + 1)}
    if choices.random() < 0.8:
        schema["maxItems"] = choices.randint(0, 4)
    if choices.random() < 0.4:
        schema["minItems"] = choices.randint(0, 3)
    if choices.random() < 0.15:
        schema["prefixItems"] = [_any(choices, depth + 1) for _ in range(choices.randint(1, 3))]
    if choices.random() < 0.05:
        schema["uniqueItems"] = True
    return schema


def _string(choices: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    kind = choices.randrange(4)
    if kind == 0:
        schema["pattern"] = choices.choice(PATTERNS)
    elif kind == 1:
        schema["format"] = choices.choice(FORMATS)
    if choices.random() < 0.6:
        schema["maxLength"] = choices.randint(0, 20)
    if choices.random() < 0.3:
        schema["minLength"] = choices.randint(0, 10)
    return schema


def _number(choices: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": choices.choice(("integer", "number"))}
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if choices.random() < 0.35:
            schema[name] = choices.randint(-10, 1000) if choices.random() < 0.8 else round(choices.uniform(-5, 5), 2)
    if choices.random() < 0.1:
        schema["multipleOf"] = choices.choice((1, 2, 5, 10))
    return schema


def _constant(choices: random.Random, depth: int) -> dict[str, Any]:
    if choices.random() < 0.4:
        return {"const": choices.choice(CONSTANTS)}
    return {"enum": choices.sample(CONSTANTS, choices.randint(1, 4))}


def _combined(choices: random.Random, depth: int) -> dict[str, Any]:
    word = choices.choice(("anyOf", "anyOf", "oneOf", "allOf"))
    return {word: [_any(choices, depth + 1) for _ in range(choices.randint(1, 3))]}


def _mixed(choices: random.Random, depth: int) -> dict[str, Any]:
    return {"type": choices.sample(["null", "boolean", "integer"], choices.randint(1, 3))}


def _reference(choices: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": choices.choice(("#/$defs/d", "#/$defs/node", "#/$defs/missing"))}


def _odd(choices: random.Random, depth: int) -> dict[str, Any]:
    return choices.choice((
        {}, {"not": {"type": "string"}}, {"if": {"type": "integer"}, "then": {"minimum": 3}}, {"type": "nonsense"},
        {"type": "string", "minLength": 5, "maxLength": 2}, {"minimum": "3"}, {"x-own": 1, "type": "null"},
        {"type": "integer", "minimum": 10, "maximum": 1}, {"enum": []}, {"nullable": True, "type": "boolean"},
    ))  # fmt: skip


def _node() -> dict[str, Any]:
    return {
        "type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"], "additionalProperties": False,
    }  # fmt: skip
