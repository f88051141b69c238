"""`response_format`, `structured_outputs` and `text.format`, from the request to what the engine is sent."""

from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.forms import form_of
from quire.server.protocol.validation import validate
from quire.structured_outputs import StructuredOutputsParams
from tests.server.fake_engine import CHAT, MODEL, assert_error, in_loop, make_server, requests_to

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def form(**fields: Any) -> StructuredOutputsParams | None:
    body = validate(ChatRequest, {**CHAT, **fields})
    return form_of(body.response_format, body.structured_outputs)


def test_each_way_to_ask_for_a_form() -> None:
    assert form() is form(response_format={"type": "text"}) is None
    assert form(response_format={"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    assert form(response_format=NAMED) == StructuredOutputsParams(json=SCHEMA)
    assert form(structured_outputs={"json": SCHEMA}) == form(response_format=NAMED)
    assert form(structured_outputs={"json": '{"type": "object"}', "disable_any_whitespace": True}) == (
        StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True)
    )
    assert form(structured_outputs={"choice": ["a", "b"]}) == StructuredOutputsParams(choice=["a", "b"])
    assert form(structured_outputs={"regex": "a+", "json_object": False}) == StructuredOutputsParams(regex="a+")
    defaults = {"disable_additional_properties": False, "structural_tag": None, "whitespace_pattern": None}
    assert form(structured_outputs={"regex": "a+", **defaults}) == StructuredOutputsParams(regex="a+")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {**NAMED, "type": "json_object"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {**NAMED, "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": NAMED, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties"),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(ChatRequest, {**CHAT, **fields})
    assert caught.value.param == param


REQUESTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": ["a", "b"]},
    "/v1/responses": {"model": MODEL, "input": "a"},
}

FREE_TEXT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"response_format": {"type": "text"}},
    "/v1/completions": {"response_format": {"type": "text"}},
    "/v1/responses": {"text": {"format": {"type": "text"}}},
}


@pytest.mark.parametrize("path", REQUESTS)
@in_loop
async def test_the_engine_is_sent_the_form(path: str) -> None:
    app, engine = make_server()
    form = {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
    asked = form if path == "/v1/responses" else {"response_format": NAMED}
    async with requests_to(app) as client:
        response = await client.post(path, json={**REQUESTS[path], **asked})
        assert response.status_code == 200, response.text
        if path == "/v1/responses":
            assert response.json()["text"] == form["text"]
    for request in engine.submitted:
        assert request.sampling is not None
        assert request.sampling.structured_outputs == StructuredOutputsParams(json=SCHEMA)


@pytest.mark.parametrize("path", REQUESTS)
@in_loop
async def test_a_form_that_cannot_be_enforced_is_named_as_it_came(path: str) -> None:
    app, engine = make_server()
    broken = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    async with requests_to(app) as client:
        for asked, param in (
            ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
            ({"structured_outputs": {"regex": "("}, **FREE_TEXT[path]}, "structured_outputs.regex"),
            ({"structured_outputs": {"json": broken}}, "structured_outputs.json"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ):
            response = await client.post(path, json={**REQUESTS[path], **asked})
            assert_error(response, 400, "invalid_parameter", param)
        if path == "/v1/responses":
            asked = {"text": {"format": {"type": "json_schema", "name": "x", "schema": broken}}}
            param = "text.format.schema"
        else:
            asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": broken}}}
            param = "response_format.json_schema.schema"
        assert_error(await client.post(path, json={**REQUESTS[path], **asked}), 400, "invalid_parameter", param)
    assert engine.submitted == []
