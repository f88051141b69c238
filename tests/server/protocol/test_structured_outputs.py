"""`response_format`, `structured_outputs` and `text.format`, from the request to the engine."""

import json
from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.validation import validate
from quire.structured_outputs import StructuredOutputsParams
from tests.server.fake_engine import CHAT, MODEL, assert_error, in_loop, make_server, requests_to

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def params(**fields: Any) -> StructuredOutputsParams | None:
    body = validate(ChatRequest, {**CHAT, **fields})
    return body.sampling_values().get("structured_outputs")


def test_each_way_to_ask_for_structured_output() -> None:
    assert params() is params(response_format={"type": "text"}) is None
    assert params(response_format={"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    assert params(response_format=NAMED) == StructuredOutputsParams(json=SCHEMA)
    assert params(structured_outputs={"json": SCHEMA}) == params(response_format=NAMED)
    assert params(structured_outputs={"json": '{"type": "object"}', "disable_any_whitespace": True}) == (
        StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True)
    )
    assert params(structured_outputs={"choice": ["a", "b"]}) == StructuredOutputsParams(choice=["a", "b"])
    assert params(structured_outputs={"regex": "a+", "json_object": False}) == StructuredOutputsParams(regex="a+")
    defaults = {"disable_additional_properties": False, "structural_tag": None, "whitespace_pattern": None}
    assert params(structured_outputs={"regex": "a+", **defaults}) == StructuredOutputsParams(regex="a+")


LOOSE = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}, "c": {"$ref": "#/$defs/C"}},
         "$defs": {"C": {"properties": {"d": {}}}}}  # fmt: skip


def test_response_format_has_declared_keys_only_unless_the_schema_says_more() -> None:
    found = params(response_format=json_schema(LOOSE))
    assert found is not None
    closed = {"type": "object", "additionalProperties": False}
    assert json.loads(found.text) == {
        "properties": {"a": {**LOOSE["properties"]["a"], **closed}, "c": {"$ref": "#/$defs/C"}},
        "$defs": {"C": {"properties": {"d": {}}, **closed}}, **closed,
    }  # fmt: skip
    for stated in ({"required": ["a"]}, {"additionalProperties": True}, {"additionalProperties": False}):
        schema = {"type": "object", "properties": {"a": {}}, **stated}
        assert params(response_format=json_schema(schema)) == StructuredOutputsParams(json=schema)


def test_structured_outputs_json_stays_as_it_is() -> None:
    assert params(structured_outputs={"json": LOOSE}) == StructuredOutputsParams(json=LOOSE)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {**NAMED, "type": "json_object"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {**NAMED, "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": NAMED, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "a", "reasoning": {}}}, "structured_outputs.reasoning"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties"),
        ({"structured_outputs": {"json_object": True, "disable_additional_properties": 0}},
         "structured_outputs.disable_additional_properties"),
    ],
)  # fmt: skip
def test_malformed_structured_output_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(ChatRequest, {**CHAT, **fields})
    assert caught.value.param == param


REQUESTS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": (CHAT, lambda schema: {"response_format": json_schema(schema)}),
    "/v1/completions": (
        {"model": MODEL, "prompt": ["a", "b"]},
        lambda schema: {"response_format": json_schema(schema)},
    ),
    "/v1/responses": (
        {"model": MODEL, "input": "a"},
        lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
    ),
}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("path", REQUESTS)
@in_loop
async def test_engine_gets_the_schema_and_errors_name_the_field_that_was_sent(path: str) -> None:
    app, engine = make_server()
    body, with_schema = REQUESTS[path]
    is_response = path == "/v1/responses"
    free = {"text": {"format": {"type": "text"}}} if is_response else {"response_format": {"type": "text"}}
    broken = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    field = "text.format.schema" if is_response else "response_format.json_schema.schema"
    async with requests_to(app) as client:
        for asked, param in (
            ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
            ({"structured_outputs": {"regex": "("}, **free}, "structured_outputs.regex"),
            ({"structured_outputs": {"json": broken}}, "structured_outputs.json"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
            (with_schema(broken), field),
        ):
            response = await client.post(path, json={**body, **asked})
            assert_error(response, 400, "invalid_parameter", param)
        assert engine.submitted == []
        for schema in (SCHEMA, LOOSE):
            response = await client.post(path, json={**body, **with_schema(schema)})
            assert response.status_code == 200, response.text
            if is_response:
                assert response.json()["text"] == with_schema(schema)["text"]
    given = {request.sampling.structured_outputs for request in engine.submitted if request.sampling}
    assert given == {StructuredOutputsParams(json=SCHEMA), params(response_format=json_schema(LOOSE))}
