"""`/v1/responses`, whole and as events."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseError, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.outputs import CompletionOutput, Logprob
from quire.server.protocol.responses import OutputMessage, ResponseObject, ResponsesRequest
from quire.server.protocol.validation import validate
from quire.server.request_record import ANONYMOUS
from quire.server.routes.responses import ResponseJob, ResponseOutput, prepare_response
from tests.engine.builders import EOS, saying
from tests.server.fake_engine import MODEL, assert_error, events, in_loop, make_server, requests_to, use_template

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LONG = {"num_blocks": 2000, "max_model_len": 2048, "max_num_batched_tokens": 2048}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather"}
TOOLS = [
    {**WEATHER, "description": "Weather of a city", "parameters": CITY, "strict": True},
    {**WEATHER, "name": "now"},
]
CALL = '{"name": "weather", "arguments": {"city": "Orléans"}}'
ORDER = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done",
]  # fmt: skip


async def ask(text: str = "Hello wörld", **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Return a whole answer, the events of a streamed one, and the engine's first request; checks all schemas."""
    app, engine = make_server(next_token=saying(text), **LONG)
    async with requests_to(app) as client:
        body = {"model": MODEL, "input": "hi", **fields}
        response = await client.post(PATH, json=body)
        assert response.status_code == 200, response.text
        streamed = (await client.post(PATH, json={**body, "stream": True})).text
    ResponseObject.model_validate(response.json())
    found = []
    for name, data in events(streamed):
        found.append(json.loads(data))
        EVENT.validate_python(found[-1], strict=True)
        assert name == found[-1]["type"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert engine.num_requests == 0
    return response.json(), found, engine.submitted[0]


@in_loop
async def test_text_whole_and_as_events_in_openais_order() -> None:
    answer, found, _ = await ask()
    assert (answer["status"], answer["store"], answer["error"]) == ("completed", False, None)
    (item,) = answer["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello wörld", "annotations": [], "logprobs": []}]
    assert answer["usage"]["output_tokens"] == 13
    assert answer["temperature"] == 0.5, "the model's recommendation"
    kinds = [event["type"] for event in found]
    assert list(dict.fromkeys(kinds)) == [*ORDER, "response.completed"]
    assert [kinds.count(kind) for kind in ORDER] == [1, 1, 1, 1, 11, 1, 1, 1]
    deltas = "".join(event["delta"] for event in found if event["type"] == ORDER[4])
    last = found[-1]["response"]
    assert deltas == found[-4]["text"] == last["output"][0]["content"][0]["text"] == "Hello wörld"
    assert last["usage"]["output_tokens"] == 13
    assert (found[0]["response"]["status"], found[0]["response"]["usage"]) == ("in_progress", None)
    assert len({event["item_id"] for event in found if event.get("item_id")} | {last["output"][0]["id"]}) == 1


@in_loop
async def test_length_limit_makes_the_response_incomplete() -> None:
    answer, found, _ = await ask(max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert (found[-1]["type"], found[-1]["response"]["status"]) == ("response.incomplete", "incomplete")


@in_loop
async def test_options_of_reasoning_are_repeated() -> None:
    answer, found, _ = await ask(reasoning={"effort": "low", "summary": "auto", "max_tokens": 5})
    for response in (answer, found[0]["response"], found[-1]["response"]):
        assert response["reasoning"] == {"effort": "low", "summary": "auto"}
    answer, _, _ = await ask()
    assert answer["reasoning"] == {"effort": None, "summary": None}


@in_loop
async def test_error_is_an_answer_before_the_first_event_and_an_event_after_it() -> None:
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
    error = ResponseError.model_validate(last["response"]["error"])  # OpenAI's, of which codes are an enumeration
    assert error.code == "server_error"
    assert error.message.endswith("(engine_dead)")
    ResponseObject.model_validate(last["response"])


# --- Functions --------------------------------------------------------------------------------


@in_loop
async def test_call_is_an_item_with_events_of_its_own() -> None:
    answer, found, request = await ask(CALL, tools=TOOLS)
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
async def test_call_of_a_function_in_a_namespace_has_both_names() -> None:
    space = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": TOOLS}
    answer, found, _ = await ask(CALL.replace("weather", "crm__weather"), tools=[space])
    (item,) = answer["output"]
    assert (item["namespace"], item["name"], answer["tools"][0]["name"]) == ("crm", "weather", "crm")
    added = next(event["item"] for event in found if event["type"] == "response.output_item.added")
    assert (added["namespace"], added["name"]) == ("crm", "weather")


@in_loop
async def test_tools_and_choice_are_repeated_and_a_demanded_call_is_structured_output() -> None:
    answer, found, request = await ask(CALL, tools=TOOLS, tool_choice=WEATHER, parallel_tool_calls=False)
    for response in (answer, found[0]["response"], found[-1]["response"]):
        assert (response["tool_choice"], response["parallel_tool_calls"]) == (WEATHER, False)
        assert [(tool["name"], tool["strict"]) for tool in response["tools"]] == [("weather", True), ("now", None)]
    assert answer["output"][0]["name"] == "weather"
    assert "now" not in request.sampling.structured_outputs.text
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    answer, _, request = await ask(f"[{CALL}]", tools=TOOLS, tool_choice=allowed)
    assert (answer["output"][0]["name"], answer["tool_choice"]) == ("weather", allowed)
    assert "now" not in request.sampling.structured_outputs.text
    assert b'"now"' not in bytes(token for token in request.prompt_token_ids if token < 256)
    answer, _, _ = await ask("x")
    assert (answer["tools"], answer["tool_choice"]) == ([], "auto")


@in_loop
async def test_errors_that_need_the_model_name_the_field_that_was_sent() -> None:
    app, engine = make_server(options={"max_logprobs": 3}, **LONG)
    broken = {"type": "function", "name": "a", "parameters": {"type": "no such type"}}
    async with requests_to(app) as client:
        for fields, param in (
            ({"tools": [broken], "tool_choice": "required"}, "tools"),
            ({"tools": TOOLS, "tool_choice": {**WEATHER, "name": "other"}}, "tool_choice"),
            ({"top_logprobs": 4}, "top_logprobs"),
        ):
            response = await client.post(PATH, json={"model": MODEL, "input": "hi", **fields})
            assert_error(response, 400, "invalid_parameter", param)
    assert engine.submitted == []


# --- The prompt, and the object ---------------------------------------------------------------


@in_loop
async def test_instructions_and_messages_become_one_conversation() -> None:
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "b"}]}, {"role": "assistant", "content": "c"}]
    _, _, request = await ask("x", input=[*turns], instructions="a")
    # The template of the tests writes token 257 before each message and 258 at the end.
    assert request.prompt_token_ids == [257, 97, 257, 98, 257, 99, 258]


TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}{{ message.content }}{% endfor %}"
)
APP, _ = make_server(**LONG)
STATE = APP.state.quire


def prepare(template: str = TEMPLATE, **fields: Any) -> ResponseJob:
    use_template(APP, template)
    body = validate(ResponsesRequest, {"model": MODEL, "input": "hi", **fields})
    return asyncio.run(prepare_response(STATE, body, ANONYMOUS))


# --- Items from any pieces of text ------------------------------------------------------------

Event = tuple[str, dict[str, Any]]
WITH_TOOLS = prepare(tools=TOOLS, top_logprobs=1)
FIRST = f"<tool_call>{CALL}</tool_call>"
SECOND = '<tool_call>\n{"name": "now", "arguments": {"zone": "ü"}}\n</tool_call>'


def positions(token_ids: list[int]) -> list[dict[int, Logprob]]:
    return [{token_id: Logprob(-0.5, 1, f"t{token_id}")} for token_id in token_ids]


def as_sent(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def written(
    text: str, cuts: list[int], *, delay: int = 0, reason: str = "stop", job: ResponseJob = WITH_TOOLS
) -> tuple[list[dict[str, Any]], list[Event]]:
    """Items and events of a text cut at these bytes, each a token; text comes `delay` characters late."""
    found: list[Event] = []
    made = ResponseOutput(job, lambda kind, content: found.append((kind, as_sent(content))))
    made.begin()
    token_ids = list(text.encode())
    start = shown = 0
    for end in cuts:
        whole = bytes(token_ids[:end]).decode(errors="ignore")
        until = max(shown, len(whole) - delay)
        made.write(CompletionOutput(0, text[shown:until], token_ids[start:end], None, positions(token_ids[start:end])))
        start, shown = end, until
    rest = [*token_ids[start:], EOS]
    made.write(CompletionOutput(0, text[shown:], rest, None, positions(rest), reason))
    return as_sent(made.items), found


def shown(items: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Items without their ids."""
    return [
        ("message", item["content"][0]["text"], item["status"])
        if item["type"] == "message"
        else (item["name"], item["arguments"], item["status"])
        for item in items
    ]


def rebuilt(found: list[Event]) -> list[dict[str, Any]]:
    """Build the items from the events as a client does; checks that they come in OpenAI's order."""
    items: list[dict[str, Any]] = []
    text = ""
    state = "done"
    for kind, content in found:
        what = kind.removeprefix("response.")
        index = content["output_index"]
        if what == "output_item.added":
            assert (state, index) == ("done", len(items))
            items.append(dict(content["item"]))
            assert items[-1]["status"] == "in_progress"
            state, text = "added", ""
            continue
        assert index == len(items) - 1
        if what == "content_part.added":
            assert (state, items[-1]["type"], content["content_index"]) == ("added", "message", 0)
            state = "open"
        elif what in ("output_text.delta", "function_call_arguments.delta"):
            assert state in ("open", "added")
            text += content["delta"]
        elif what in ("output_text.done", "function_call_arguments.done"):
            assert content.get("text", content.get("arguments")) == text
            state = "closing"
        elif what == "content_part.done":
            assert (state, content["part"]["text"]) == ("closing", text)
        else:
            assert (what, state) == ("output_item.done", "closing")
            assert content["item"]["id"] == items[-1]["id"]
            items[-1] = content["item"]
            state = "done"
        if what != "output_item.done":
            assert content["item_id"] == items[-1]["id"]
    assert state == "done"
    return items


def check(text: str, cuts: list[int], **options: Any) -> list[dict[str, Any]]:
    """Items, checked against their events; log-probabilities cover the text of messages, and nothing of calls."""
    items, found = written(text, cuts, **options)
    assert rebuilt(found) == items
    for item in items:
        if item["type"] == "function_call":
            assert "logprobs" not in item
            if item["status"] == "completed":
                json.loads(item["arguments"])
            continue
        entries = OutputMessage.model_validate(item).content[0].logprobs
        assert all(len(entry.top_logprobs) == 1 for entry in entries)
        assert all(entry.token != f"t{EOS}" for entry in entries[:-1]), "the end comes last"
        covered = b"".join(bytes(entry.bytes) for entry in entries if entry.token != f"t{EOS}")
        assert covered.decode() == item["content"][0]["text"]
        deltas = [content for kind, content in found if kind == "response.output_text.delta"]
        streamed = [entry for content in deltas if content["item_id"] == item["id"] for entry in content["logprobs"]]
        assert streamed == item["content"][0]["logprobs"]
    for kind, content in found:
        assert ("logprobs" in content) == (kind in ("response.output_text.delta", "response.output_text.done"))
    return items


def test_text_then_calls_then_text() -> None:
    items = check(f"Lét me  {FIRST}{SECOND} see. ", [])
    assert shown(items) == [
        ("message", "Lét me", "completed"),
        ("weather", '{"city": "Orléans"}', "completed"),
        ("now", '{"zone": "ü"}', "completed"),
        ("message", " see. ", "completed"),
    ]
    assert items[3]["content"][0]["logprobs"][-1]["token"] == f"t{EOS}", "as without tools"
    assert [item["id"].split("_")[0] for item in items] == ["msg", "fc", "fc", "msg"]
    assert len({items[1]["id"], items[1]["call_id"], items[2]["call_id"]}) == 3


def test_items_that_were_cut_off_are_incomplete() -> None:
    assert shown(check("Hello", [], reason="length")) == [("message", "Hello", "incomplete")]
    assert shown(check(FIRST[:-20], [], reason="length"))[0][2] == "incomplete"
    assert shown(check(FIRST[:-3], [], reason="length"))[0][2] == "completed", "its arguments are whole"


PIECES = [FIRST, SECOND, "Hello ", "wörld ", " ", "<tool", "{", '"name"', "é", '<tool_call>{"name": "other"}']
NOT_PARALLEL = prepare(tools=TOOLS, top_logprobs=1, parallel_tool_calls=False)


@pytest.mark.parametrize("job", [WITH_TOOLS, NOT_PARALLEL], ids=["parallel", "one call"])
@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(PIECES), max_size=6),
    st.lists(st.integers(0, 200), max_size=8),
    st.integers(0, 5),
    st.sampled_from(["stop", "length"]),
)
def test_items_do_not_depend_on_the_pieces_of_the_text(
    job: ResponseJob, parts: list[str], cuts: list[int], delay: int, reason: str
) -> None:
    text = "".join(parts)
    places = sorted(cut for cut in cuts if cut <= len(text.encode()))
    pieces = check(text, places, delay=delay, reason=reason, job=job)
    whole = check(text, [], reason=reason, job=job)
    assert shown(pieces) == shown(whole)
    assert [item.get("content") for item in pieces] == [item.get("content") for item in whole]
