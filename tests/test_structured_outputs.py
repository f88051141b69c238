"""Checks of `StructuredOutputsParams` without a compiler: kinds, sizes, depth."""

import json
from typing import Any

import msgspec
import pytest

from quire.errors import InvalidParameterError
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.structured_outputs import MAX_CHOICES, MAX_SCHEMA_DEPTH, MAX_TEXT_BYTES, StructuredOutputsParams


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"a": schema}
    return schema


GOOD: list[dict[str, Any]] = [
    {"json": {}},
    {"json": "{}"},
    {"json": ' {"type": "object"} '},
    {"json": nested(MAX_SCHEMA_DEPTH)},
    {"json_object": True},
    {"json_object": True, "disable_any_whitespace": True},
    {"json": {}, "whitespace_pattern": " *"},
    {"regex": "a"},
    {"choice": ["a"]},
    {"choice": [str(i) for i in range(MAX_CHOICES)]},
    {"grammar": 'start: "a"'},
    {"regex": "a" * MAX_TEXT_BYTES},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"),
    ({"regex": "a", "choice": ["b"]}, "exactly one of json, json_object, regex, choice, grammar"),
    ({"json": 3}, "structured_outputs.json must be a JSON Schema"),
    ({"json": "[1]"}, "a JSON object"),
    ({"json": "{"}, "JSON"),
    ({"json": ""}, "non-empty"),
    ({"json": nested(MAX_SCHEMA_DEPTH + 1)}, "at most 64 levels"),
    ({"json": nested(10_000)}, "at most 64 levels"),
    ({"json": '{"a":' * 10_000 + "{}" + "}" * 10_000}, "levels|at most 65536 bytes"),
    ({"json": '{"a":' * 5_000 + "{}" + "}" * 5_000}, "at most 64 levels"),
    ({"json": {"enum": [f"value {i}" for i in range(100_000)]}}, "at most 65536 bytes"),
    ({"json": {"const": "x" * MAX_TEXT_BYTES}}, "at most 65536 bytes"),
    ({"json": {"const": {1, 2}}}, "JSON values"),
    ({"json": {"const": float("nan")}}, "JSON values"),
    ({"json": '{"const": 1e999}'}, "JSON values"),
    ({"json": '{"const": ' + "9" * 5000 + "}"}, "JSON"),
    ({"json": {"const": "\ud800"}}, "surrogates"),
    ({"json": '{"const": "\\ud800"}'}, "surrogates"),
    ({"json_object": False}, "true, or left out"),
    ({"json_object": 1}, "true, or left out"),
    ({"regex": ""}, "non-empty"),
    ({"regex": 3}, "non-empty"),
    ({"regex": "\udfff"}, "surrogates"),
    ({"regex": "a" * (MAX_TEXT_BYTES + 1)}, "at most 65536 bytes"),
    ({"choice": []}, "non-empty list"),
    ({"choice": "abc"}, "list of strings"),
    ({"choice": ["a", ""]}, "non-empty strings"),
    ({"choice": ["a", 1]}, "non-empty strings"),
    ({"choice": ["a", "\ud800"]}, "surrogates"),
    ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, "at most 1000 strings"),
    ({"choice": ["x" * 40_000, "y" * 40_000]}, "at most 65536 bytes"),
    ({"grammar": ""}, "non-empty"),
    ({"grammar": None}, "exactly one"),
    ({"regex": "a", "whitespace_pattern": " "}, "unless json"),
    ({"choice": ["a"], "disable_any_whitespace": True}, "unless json"),
    ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "left out"),
    ({"json": {}, "disable_any_whitespace": 1}, "true or false"),
]


@pytest.mark.parametrize("fields", GOOD)
def test_valid_constraints_are_accepted(fields: dict[str, Any]) -> None:
    spec = StructuredOutputsParams(**fields)
    assert spec.kind in fields
    assert hash(spec) == hash(StructuredOutputsParams(**fields))


@pytest.mark.parametrize(("fields", "says"), BAD, ids=range(len(BAD)))
def test_invalid_constraint_names_the_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParameterError, match=says) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.field.startswith("structured_outputs")
    assert len(caught.value.message) < 400


def test_schema_is_kept_as_text_in_its_order() -> None:
    spec = StructuredOutputsParams(json={"properties": {"b": {}, "a": {}}, "title": "é"})
    assert spec.text == '{"properties":{"b":{},"a":{}},"title":"é"}'
    assert spec == StructuredOutputsParams(json=spec.text)


def test_text_of_each_kind() -> None:
    assert json.loads(StructuredOutputsParams(json_object=True).text) == {"type": "object"}
    assert json.loads(StructuredOutputsParams(choice=["é", "b", "é"]).text) == ["é", "b"]
    assert StructuredOutputsParams(regex="a+").text == "a+"
    assert StructuredOutputsParams(grammar="start: x").text == "start: x"


@pytest.mark.parametrize("fields", GOOD, ids=range(len(GOOD)))
def test_constraint_survives_recording(fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


def test_beam_search_refuses_structured_outputs() -> None:
    with pytest.raises(InvalidParameterError, match="left out in beam search"):
        BeamSearchParams(beam_width=2, max_tokens=4, structured_outputs=StructuredOutputsParams(regex="a"))
