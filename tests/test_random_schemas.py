"""Random small schemas: jsonschema validates each finished answer of the real model."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.errors import InvalidParameterError
from quire.grammar.compiler import check_grammar
from quire.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.model
NUM_SCHEMAS = 20
MAX_TOKENS = 120
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


def test_finished_answers_follow_their_schemas(smollm2_path: Path) -> None:
    draws = random.Random(0)
    taken: list[tuple[dict[str, Any], StructuredOutputsParams]] = []
    num_refused = 0
    while len(taken) < NUM_SCHEMAS:
        schema = some_schema(draws, 3)
        spec = StructuredOutputsParams(json=schema)
        try:
            check_grammar(spec)
        except InvalidParameterError:
            num_refused += 1
            continue
        taken.append((schema, spec))
    assert num_refused < NUM_SCHEMAS, "most are supported"
    params = [
        SamplingParams(temperature=1, max_tokens=MAX_TOKENS, seed=seed, structured_outputs=spec)
        for seed, (_, spec) in enumerate(taken)
    ]
    llm = LLM(str(smollm2_path), max_num_seqs=32, max_model_len=512)
    outputs = llm.generate(["An example in JSON: "] * NUM_SCHEMAS, params, use_tqdm=False)
    num_finished = 0
    for (schema, _), output in zip(taken, outputs, strict=True):
        (found,) = output.outputs
        assert found.finish_reason in ("stop", "length"), (found.error, schema)
        if found.finish_reason == "stop":
            num_finished += 1
            validator = jsonschema.Draft202012Validator(schema)
            errors = [error.message for error in validator.iter_errors(json.loads(found.text))]
            assert not errors, (errors, found.text, schema)
    assert num_finished > NUM_SCHEMAS // 2
