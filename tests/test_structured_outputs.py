"""Checks of `StructuredOutputsParams` without a compiler: kinds, sizes, depth."""

import json
from typing import Any

import msgspec
import pytest

from quire.errors import InvalidParameterError
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.structured_outputs import (
    MAX_CHOICES,
    MAX_SCHEMA_DEPTH,
    MAX_TEXT_BYTES,
    ReasoningSpan,
    StructuredOutputsParams,
)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"a": schema}
    return schema


SPAN = {"start": "<r>", "end": "</r>", "is_open": False}
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
    {"json": {}, "reasoning": SPAN},
    {"regex": "a", "reasoning": {**SPAN, "start": "", "is_open": True, "budget": 0, "closing": "So. </r>\n\n"}},
    {"choice": ["a"], "reasoning": ReasoningSpan(start="<r>", end="</r>", is_open=True, budget=7)},
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
    ({"regex": "a", "choice": ["b"], "reasoning": SPAN}, "exactly one"),
    ({"whitespace_pattern": " ", "reasoning": SPAN}, "unless json"),
    ({"regex": "a", "reasoning": "<r>"}, "a ReasoningSpan"),
    ({"reasoning": {"start": "<r>", "end": "</r>"}}, "start, end and is_open"),
    ({"reasoning": {**SPAN, "begin": "<r>"}}, "start, end and is_open"),
    ({"reasoning": {**SPAN, "start": ""}}, "reasoning.start must be a non-empty string"),
    ({"reasoning": {**SPAN, "start": " \n"}}, "reasoning.start must be more than white space"),
    ({"reasoning": {**SPAN, "start": None, "is_open": True}}, "reasoning.start"),
    ({"reasoning": {**SPAN, "end": ""}}, "reasoning.end must be a non-empty string"),
    ({"reasoning": {**SPAN, "end": "\ud800"}}, "surrogates"),
    ({"reasoning": {**SPAN, "is_open": 1}}, "reasoning.is_open must be true or false"),
    ({"reasoning": {**SPAN, "budget": -1}}, "reasoning.budget must be a number of tokens"),
    ({"reasoning": {**SPAN, "budget": True}}, "reasoning.budget"),
    ({"reasoning": {**SPAN, "budget": 1.5}}, "reasoning.budget"),
    ({"reasoning": {**SPAN, "closing": "Enough."}}, "reasoning.closing must be a text with '</r>' in it"),
    ({"reasoning": {**SPAN, "opening": 3}}, "reasoning.opening must be a non-empty string"),
    ({"reasoning": {**SPAN, "closing": None}}, "reasoning.closing"),
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


def test_reasoning_is_no_part_of_the_constraint() -> None:
    span = ReasoningSpan(start="<r>", end="</r>", is_open=False)
    both = StructuredOutputsParams(json={"type": "object"}, reasoning=span)
    alone = StructuredOutputsParams(json={"type": "object"})
    assert both != alone
    assert both.constraint == alone.constraint == alone
    assert both.reasoning == span, "it is not changed"
    free = StructuredOutputsParams(reasoning=SPAN)
    assert (free.reasoning, free.constraint, free.kind, free.text) == (span, None, None, "")


def test_beam_search_refuses_structured_outputs() -> None:
    with pytest.raises(InvalidParameterError, match="left out in beam search"):
        BeamSearchParams(beam_width=2, max_tokens=4, structured_outputs=StructuredOutputsParams(regex="a"))
