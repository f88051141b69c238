"""From a request to `/v1/responses` to a prompt, and to the response object."""

from typing import Any

from quire.server.caller import ANONYMOUS
from quire.server.front_end import FrontEnd
from quire.server.protocol.responses import ResponseObject, ResponsesRequest
from quire.server.protocol.validation import validate
from quire.server.routes.response_job import ResponseJob, item_id, prepare_response
from tests.engine.builders import byte_tokenizer, make_config, saying
from tests.server.fake_engine import MODEL, in_loop, make_server, requests_to

PATH = "/v1/responses"
LONG = {"num_blocks": 2000, "max_model_len": 2048, "max_num_batched_tokens": 2048}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather"}
TOOLS = [
    {**WEATHER, "description": "Weather of a city", "parameters": CITY, "strict": True},
    {**WEATHER, "name": "now"},
]


def prepare(template: str | None = None, **fields: Any) -> ResponseJob:
    front_end = FrontEnd(make_config(max_model_len=2048), byte_tokenizer(), template)
    body = validate(ResponsesRequest, {"model": MODEL, "input": "hi", **fields})
    return prepare_response(front_end, body, ANONYMOUS, MODEL)


def test_the_response_object_in_each_of_its_states() -> None:
    job = prepare(tools=TOOLS, tool_choice=WEATHER, metadata={"a": "b"}, max_output_tokens=3)
    for status, reason in (("in_progress", None), ("completed", None), ("incomplete", "max_output_tokens")):
        written = ResponseObject.model_validate(job.response(status))
        assert (written.status, written.metadata, written.max_output_tokens) == (status, {"a": "b"}, 3)
        assert (written.completed_at is not None) == (status == "completed")
        assert (written.incomplete_details and written.incomplete_details.reason) == reason
    error = {"code": "engine_dead", "message": "gone"}
    assert ResponseObject.model_validate(job.response("failed", error=error)).error is not None


def test_calls_of_tools_are_read_only_where_there_are_tools() -> None:
    assert prepare().tool_use is None
    use = prepare(tools=TOOLS, parallel_tool_calls=False).tool_use
    assert use is not None
    assert (use.names, use.is_parallel, use.schema) == ({"weather", "now"}, False, None)


def test_the_template_sees_the_variables_of_the_request() -> None:
    template = "{{ 'on' if thinks else 'off' }}"
    prompts = [prepare(template, chat_template_kwargs=given).request for given in (None, {"thinks": True})]
    assert [bytes(request.prompt_token_ids) for request in prompts] == [b"off", b"on"]


def test_ids() -> None:
    assert prepare(request_id="mine").response_id == "resp_mine"
    assert item_id("fc").startswith("fc_")
    assert item_id("fc") != item_id("fc")


@in_loop
async def test_instructions_and_messages_become_one_conversation() -> None:
    app, engine = make_server(next_token=saying("x"))
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "b"}]}, {"role": "assistant", "content": "c"}]
    async with requests_to(app) as client:
        await client.post(PATH, json={"model": MODEL, "input": [*turns], "instructions": "a"})
    # The template of the tests writes token 257 before each message and 258 at the end.
    assert engine.submitted[0].prompt_token_ids == [257, 97, 257, 98, 257, 99, 258]


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
