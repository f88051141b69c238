"""`/v1/responses`, whole and as events."""

import json
from typing import Any

from quire.server.protocol.responses import ResponseEvent, ResponseObject
from tests.engine.builders import saying
from tests.server.fake_engine import MODEL, assert_error, events, in_loop, make_server, requests_to

PATH = "/v1/responses"


async def ask(fields: dict[str, Any]) -> dict[str, Any]:
    app, _ = make_server(next_token=saying("Hello wörld"))
    async with requests_to(app) as client:
        response = await client.post(PATH, json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    ResponseObject.model_validate(answer)
    return answer


@in_loop
async def test_a_text() -> None:
    answer = await ask({"input": "hi"})
    assert (answer["status"], answer["store"], answer["error"]) == ("completed", False, None)
    (item,) = answer["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello wörld", "annotations": [], "logprobs": []}]
    assert answer["usage"]["output_tokens"] == 13
    assert answer["temperature"] == 0.5, "the model's recommendation"


@in_loop
async def test_a_limit_makes_it_incomplete() -> None:
    answer = await ask({"input": "hi", "max_output_tokens": 3})
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"


@in_loop
async def test_log_probabilities() -> None:
    answer = await ask({"input": "hi", "top_logprobs": 1, "max_output_tokens": 2})
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["H", "e"]


# --- Functions --------------------------------------------------------------------------------

LONG = {"num_blocks": 2000, "max_model_len": 2048, "max_num_batched_tokens": 2048}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather"}
TOOLS = [
    {**WEATHER, "description": "Weather of a city", "parameters": CITY, "strict": True},
    {**WEATHER, "name": "now"},
]
CALL = '{"name": "weather", "arguments": {"city": "Orléans"}}'


async def call(text: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """A whole answer, the events of a streamed one, and what the engine was sent."""
    app, engine = make_server(next_token=saying(text), **LONG)
    async with requests_to(app) as client:
        body = {"model": MODEL, "input": "hi", "tools": TOOLS, **fields}
        response = await client.post(PATH, json=body)
        assert response.status_code == 200, response.text
        streamed = (await client.post(PATH, json={**body, "stream": True})).text
    ResponseObject.model_validate(response.json())
    found = [json.loads(data) for _, data in events(streamed)]
    for event in found:
        ResponseEvent.model_validate(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return response.json(), found, engine.submitted[0]


@in_loop
async def test_a_call_is_an_item_and_has_events_of_its_own() -> None:
    answer, found, request = await call(CALL)
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "weather", "completed")
    assert json.loads(item["arguments"]) == {"city": "Orléans"}
    assert list(dict.fromkeys(event["type"] for event in found)) == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    deltas = "".join(event["delta"] for event in found if event["type"].endswith("arguments.delta"))
    (streamed,) = found[-1]["response"]["output"]
    assert deltas == streamed["arguments"] == item["arguments"]
    assert b"Weather of a city" in bytes(token for token in request.prompt_token_ids if token < 256)
    assert request.sampling.structured_outputs is None


@in_loop
async def test_tools_and_choice_are_repeated() -> None:
    answer, found, _ = await call(CALL, tool_choice=WEATHER, parallel_tool_calls=False)
    for response in (answer, found[0]["response"], found[-1]["response"]):
        assert (response["tool_choice"], response["parallel_tool_calls"]) == (WEATHER, False)
        assert [(tool["name"], tool["strict"]) for tool in response["tools"]] == [("weather", True), ("now", None)]
    answer, _, _ = await call("x")
    assert answer["tool_choice"] == "auto"
    assert (await ask({"input": "hi"}))["tools"] == []


@in_loop
async def test_a_demanded_call_is_a_form_of_the_answer() -> None:
    answer, _, request = await call(CALL, tool_choice=WEATHER)
    assert answer["output"][0]["name"] == "weather"
    assert "now" not in request.sampling.structured_outputs.text
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    answer, _, request = await call(f"[{CALL}]", tool_choice=allowed)
    assert (answer["output"][0]["name"], answer["tool_choice"]) == ("weather", allowed)
    assert "now" not in request.sampling.structured_outputs.text
    assert b'"now"' not in bytes(token for token in request.prompt_token_ids if token < 256)


@in_loop
async def test_no_tools_if_none_is_the_choice() -> None:
    answer, _, request = await call(CALL, tool_choice="none", top_logprobs=1)
    assert answer["output"][0]["content"][0]["text"] == CALL
    assert b"Weather" not in bytes(token for token in request.prompt_token_ids if token < 256)


@in_loop
async def test_a_call_that_is_cut_off_is_incomplete() -> None:
    answer, found, _ = await call(CALL, max_output_tokens=45)
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["output"][0]["arguments"] == answer["output"][0]["arguments"]


@in_loop
async def test_wrong_tools_are_refused_before_anything_runs() -> None:
    app, engine = make_server(**LONG)
    async with requests_to(app) as client:
        body = {"model": MODEL, "input": "hi"}
        broken = {"type": "function", "name": "a", "parameters": {"type": "no such type"}}
        response = await client.post(PATH, json={**body, "tools": [broken], "tool_choice": "required"})
        assert_error(response, 400, "invalid_parameter", "tools")
        response = await client.post(PATH, json={**body, "tools": TOOLS, "tool_choice": {**WEATHER, "name": "other"}})
        assert_error(response, 400, "invalid_parameter", "tool_choice")
        response = await client.post(PATH, json={**body, "tools": [{"type": "web_search"}]})
        assert "type function" in assert_error(response, 400, "invalid_parameter", "tools.0.type")
    assert engine.submitted == []
