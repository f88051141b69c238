"""`/v1/responses`, whole and as events."""

import json
from typing import Any

from quire.server.protocol.responses import ResponseEvent, ResponseObject
from tests.engine.builders import saying
from tests.server.fake_engine import MODEL, assert_error, events, in_loop, make_server, requests_to

PATH = "/v1/responses"
ORDER = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done",
]  # fmt: skip


async def ask(fields: dict[str, Any]) -> dict[str, Any]:
    app, _ = make_server(next_token=saying("Hello wörld"))
    async with requests_to(app) as client:
        response = await client.post(PATH, json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    ResponseObject.model_validate(answer)
    return answer


async def stream(fields: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    app, engine = make_server(next_token=saying("Hello wörld"), **settings)
    async with requests_to(app) as client:
        response = await client.post(PATH, json={"model": MODEL, "stream": True, **fields})
    assert response.status_code == 200, response.text
    found = []
    for name, data in events(response.text):
        content = json.loads(data)
        ResponseEvent.model_validate(content)
        assert name == content["type"]
        found.append(content)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert engine.num_requests == 0
    return found


@in_loop
async def test_a_text() -> None:
    answer = await ask({"input": "hi"})
    assert (answer["status"], answer["store"], answer["error"]) == ("completed", False, None)
    (item,) = answer["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello wörld", "annotations": [], "logprobs": []}]
    assert answer["usage"]["output_tokens"] == 13
    assert answer["temperature"] == 0.5, "the model's recommendation"


@in_loop
async def test_instructions_and_messages_become_one_conversation() -> None:
    app, engine = make_server(next_token=saying("x"))
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "b"}]}, {"role": "assistant", "content": "c"}]
    async with requests_to(app) as client:
        await client.post(PATH, json={"model": MODEL, "input": [*turns], "instructions": "a"})
    # The template of the tests writes token 257 before each message and 258 at the end.
    assert engine.submitted[0].prompt_token_ids == [257, 97, 257, 98, 257, 99, 258]


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
    found = await stream({"input": "hi", "top_logprobs": 1, "max_output_tokens": 2})
    assert [event["logprobs"][0] for event in found if event["type"] == ORDER[4]] == logprobs


@in_loop
async def test_events_come_in_openais_order() -> None:
    found = await stream({"input": "hi"})
    kinds = [event["type"] for event in found]
    assert list(dict.fromkeys(kinds)) == [*ORDER, "response.completed"]
    assert [kinds.count(kind) for kind in ORDER] == [1, 1, 1, 1, 11, 1, 1, 1]
    deltas = "".join(event["delta"] for event in found if event["type"] == ORDER[4])
    last = found[-1]["response"]
    assert deltas == found[-4]["text"] == last["output"][0]["content"][0]["text"] == "Hello wörld"
    assert last["usage"]["output_tokens"] == 13
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["usage"] is None
    item_ids = {event["item_id"] for event in found if event.get("item_id")} | {last["output"][0]["id"]}
    assert len(item_ids) == 1


@in_loop
async def test_an_incomplete_stream_says_so() -> None:
    found = await stream({"input": "hi", "max_output_tokens": 1})
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["status"] == "incomplete"


@in_loop
async def test_an_error_is_an_answer_before_the_first_event_and_an_event_after_it() -> None:
    app, engine = make_server(next_token=saying("Hello"))
    engine.executor.in_step = lambda step: engine.die() if step == 3 else None
    async with requests_to(app) as client:
        response = await client.post(PATH, json={"model": MODEL, "input": "hi", "stream": True})
        assert response.status_code == 200
        *_, (name, data) = events(response.text)
        response = await client.post(PATH, json={"model": MODEL, "input": "hi", "stream": True})
        assert_error(response, 503, "engine_dead")
    last = json.loads(data)
    assert (name, last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "engine_dead"
    ResponseEvent.model_validate(last)


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
async def test_a_conversation_with_calls_is_that_of_the_chat_api() -> None:
    sent = {"call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
    items = [
        {"role": "user", "content": "?"},
        {"type": "function_call", **sent},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    chat_tools = [{"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
                  for tool in TOOLS]  # fmt: skip
    function = {"name": "weather", "arguments": sent["arguments"]}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    app, engine = make_server(next_token=saying("x"), **LONG)
    async with requests_to(app) as client:
        await client.post(PATH, json={"model": MODEL, "input": items, "tools": TOOLS})
        await client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": messages, "tools": chat_tools}
        )  # fmt: skip
        token_ids = (await client.post("/tokenize", json={"messages": messages, "tools": chat_tools})).json()["tokens"]
    assert engine.submitted[0].prompt_token_ids == engine.submitted[1].prompt_token_ids == token_ids


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
