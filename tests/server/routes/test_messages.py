"""`/v1/messages`, whole and as events, and Anthropic's client, unchanged, against a server on a real port."""

import asyncio
import copy
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from quire.outputs import CompletionOutput
from quire.server.keys import KeyRing
from quire.server.protocol.messages import MessageObject, MessagesError, MessagesRequest
from quire.server.protocol.validation import validate
from quire.server.request_record import ANONYMOUS
from quire.server.routes.messages import MessageContent, MessageJob, prepare_message
from tests.engine.builders import saying
from tests.server.fake_engine import (
    MODEL,
    FakeEngine,
    events,
    in_loop,
    listening,
    make_server,
    requests_to,
    use_template,
)
from tests.server.served import serving
from tests.server.serving import serving as serving_model

PATH = "/v1/messages"
HI: Any = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "max_tokens": 400, "messages": HI}
LONG = {"num_blocks": 2000, "max_model_len": 4096, "max_num_batched_tokens": 4096}
TEXT = "Hello wörld"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "weather", "description": "Weather of a city", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Orléans"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SAYS = f"<think>\nRome?\n</think>\n\nLet me see.\n{CALL}"


def server(text: str = TEXT, template: str = TEMPLATE, **engine: Any) -> tuple[Any, FakeEngine]:
    app, fake = make_server(next_token=saying(text), **LONG | engine)
    use_template(app, template)
    return app, fake


def said(request: Any) -> str:
    return bytes(token for token in request.prompt_token_ids if token < 256).decode()


@functools.cache
def clients_types() -> tuple[Any, TypeAdapter[Any]]:
    """Anthropic's types of answers and events. Its package takes 2 s to import: only the process that needs it does."""
    from anthropic.types import Message, RawMessageStreamEvent

    return Message, TypeAdapter(RawMessageStreamEvent)


async def ask(text: str = TEXT, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Return a whole answer, the events of a streamed one, and the engine's first request; checks all types."""
    app, engine = server(text)
    async with requests_to(app) as client:
        response = await client.post(PATH, json={**BODY, **fields})
        assert response.status_code == 200, response.text
        streamed = (await client.post(PATH, json={**BODY, **fields, "stream": True})).text
    answer = response.json()
    MessageObject.model_validate(answer)
    message, event = clients_types()
    message.model_validate(answer, strict=True)
    found = []
    for name, data in events(streamed):
        found.append(json.loads(data))
        if name != "ping":  # not among the client's types
            event.validate_python(found[-1], strict=True)
        assert name == found[-1]["type"]
    assert without_ids(rebuilt(found)) == without_ids(answer["content"])
    assert engine.num_requests == 0
    return answer, found, engine.submitted[0]


def rebuilt(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build the blocks from the events as a client does; checks that they come in Anthropic's order."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    is_open = False
    for item in found:
        kind = item["type"]
        if kind == "content_block_start":
            assert (is_open, item["index"]) == (False, len(blocks))
            blocks.append(dict(item["content_block"]))
            is_open, arguments = True, ""
        elif kind == "content_block_delta":
            assert (is_open, item["index"]) == (True, len(blocks) - 1)
            delta = item["delta"]
            for name in ("text", "thinking", "signature"):
                if delta["type"] == f"{name}_delta":
                    blocks[-1][name] += delta[name]
            arguments += delta.get("partial_json", "")
        elif kind == "content_block_stop":
            assert (is_open, item["index"]) == (True, len(blocks) - 1)
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments)
    assert not is_open
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


# --- Whole answers and events -------------------------------------------------------------------


@in_loop
async def test_text_whole_and_as_events_in_anthropics_order() -> None:
    answer, found, _ = await ask()
    assert answer["content"] == [{"type": "text", "text": TEXT}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (13, 0)
    assert answer["id"].startswith("msg_")
    kinds = [item["type"] for item in found]
    assert list(dict.fromkeys(kinds)) == [
        "message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert [kinds.count(kind) for kind in ("message_start", "ping", "content_block_delta")] == [1, 1, 11]
    start, delta = found[0]["message"], found[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 13


@in_loop
async def test_reasoning_text_and_calls_are_blocks_in_their_order() -> None:
    answer, _, request = await ask(SAYS + SECOND, tools=TOOLS)
    thinking, text, first, second = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Rome?")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["name"], first["input"]) == ("weather", {"city": "Orléans"})
    assert (second["name"], second["input"]) == ("now", {})
    assert first["id"].startswith("toolu_")
    assert first["id"] != second["id"]
    assert answer["stop_reason"] == "tool_use"
    described, _, rest = said(request).partition("[user]")
    assert (described.count('"function"'), "Weather of a city" in described) == (4, True)
    assert rest == "hi[assistant]"


@pytest.mark.parametrize(
    ("fields", "text", "ending", "content"),
    [
        ({"max_tokens": 3}, TEXT, ("max_tokens", None), "Hel"),
        ({"stop_sequences": ["x", " w"]}, TEXT, ("stop_sequence", " w"), "Hello"),
        ({"stop_sequences": ["x"]}, TEXT, ("end_turn", None), TEXT),
    ],
)
@in_loop
async def test_stop_reason_tells_the_end(fields: Any, text: str, ending: Any, content: str) -> None:
    answer, found, _ = await ask(text, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ending
    assert [block["text"] for block in answer["content"]] == [content]
    assert found[-2]["delta"] == {"stop_reason": ending[0], "stop_sequence": ending[1]}


@in_loop
async def test_empty_answer_has_no_blocks() -> None:
    answer, found, _ = await ask("")
    assert (answer["content"], answer["stop_reason"]) == ([], "end_turn")
    assert [item["type"] for item in found] == ["message_start", "message_delta", "message_stop"]


@in_loop
async def test_demanded_call_has_the_reason_tool_use_and_follows_the_schema() -> None:
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    answer, _, request = await ask(
        call, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}, thinking={"type": "disabled"}
    )
    assert [(block["type"], block["input"]) for block in answer["content"]] == [("tool_use", {"city": "Rome"})]
    assert answer["stop_reason"] == "tool_use"
    assert "now" not in request.sampling.structured_outputs.text


@in_loop
async def test_disabled_parallel_use_keeps_the_first_call() -> None:
    answer, _, _ = await ask(
        CALL + SECOND, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert [block["name"] for block in answer["content"]] == ["weather"]


@in_loop
async def test_omitted_thinking_is_not_in_the_answer() -> None:
    answer, _, _ = await ask(SAYS, tools=TOOLS, thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]


THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@in_loop
async def test_budget_of_thinking_reaches_the_engine_and_disabled_thinking_the_template() -> None:
    app, engine = server("<think>\nHm.\n</think>\n\nFour.", THINKS)
    async with requests_to(app) as client:
        for thinking in ({"type": "enabled", "budget_tokens": 20}, {"type": "disabled"}, {"type": "adaptive"}):
            assert (await client.post(PATH, json={**BODY, "thinking": thinking})).status_code == 200
    limited, disabled, adaptive = engine.submitted
    assert limited.sampling.structured_outputs.reasoning.budget == 20
    assert said(disabled).endswith("</think>\n\n")
    assert said(adaptive).endswith("[assistant]")
    assert adaptive.sampling.structured_outputs is None


@in_loop
async def test_beginning_of_the_answer_is_continued() -> None:
    begun = {"role": "assistant", "content": "The answer is (  "}
    answer, _, request = await ask("B)", messages=[*HI, begun])
    assert answer["content"] == [{"type": "text", "text": "B)"}]
    assert said(request).rstrip().endswith("[assistant]The answer is (")


@in_loop
async def test_cached_prompt_tokens_are_no_input_tokens() -> None:
    app, engine = server()
    body = {**BODY, "system": "You are very helpful, and you know much about caches."}
    async with requests_to(app) as client:
        first = (await client.post(PATH, json=body)).json()["usage"]
        again = (await client.post(PATH, json=body)).json()["usage"]
        found = [json.loads(data) for _, data in events((await client.post(PATH, json={**body, "stream": True})).text)]
    num_prompt = engine.submitted[0].num_prompt_tokens
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (num_prompt, 0)
    assert again["cache_read_input_tokens"] > num_prompt // 2
    assert again["input_tokens"] + again["cache_read_input_tokens"] == num_prompt
    for usage in (found[0]["message"]["usage"], found[-2]["usage"]):
        assert usage["cache_read_input_tokens"] == again["cache_read_input_tokens"]
        assert usage["input_tokens"] == again["input_tokens"]


# --- Tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"system": [{"type": "text", "text": "Be brief."}]}, {"tools": TOOLS},
     {"tools": TOOLS, "tool_choice": {"type": "any"}}, {"messages": [*HI, {"role": "assistant", "content": "A"}]}],
    ids=str,
)  # fmt: skip
@in_loop
async def test_counted_tokens_are_those_of_the_prompt(fields: dict[str, Any]) -> None:
    app, engine = server()
    body = {"model": MODEL, "messages": HI, **fields}
    async with requests_to(app) as client:
        counted = await client.post(f"{PATH}/count_tokens", json=body)
        assert (await client.post(PATH, json={**body, "max_tokens": 1})).status_code == 200
    assert counted.json() == {"input_tokens": engine.submitted[0].num_prompt_tokens}


@in_loop
async def test_prompt_above_the_context_is_counted() -> None:
    app, engine = server()
    messages = [{"role": "user", "content": "x" * 50_000}]
    async with requests_to(app) as client:
        counted = await client.post(f"{PATH}/count_tokens", json={"model": MODEL, "messages": messages})
        refused = await client.post(PATH, json={**BODY, "messages": messages})
    assert counted.json()["input_tokens"] > 50_000
    error = MessagesError.model_validate(refused.json()).error
    assert (refused.status_code, error.type) == (400, "invalid_request_error")
    assert error.message.startswith("prompt is too long: ")
    assert engine.submitted == []


# --- Blocks from any pieces of text -------------------------------------------------------------


STATE = server()[0].state.quire


def prepared(**fields: Any) -> MessageJob:
    return asyncio.run(prepare_message(STATE, validate(MessagesRequest, {**BODY, **fields}), ANONYMOUS))


def written(text: str, cuts: list[int], job: MessageJob, reason: str = "stop") -> list[dict[str, Any]]:
    """Return the blocks of a text cut at these places; checks that their events tell the same."""
    found: list[dict[str, Any]] = []
    made = MessageContent(job, lambda kind, content: found.append({"type": kind, **copy.deepcopy(content)}))
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        made.write(CompletionOutput(0, text[start:end], [1], None, None, reason if end == len(text) else None))
        if end == len(text):
            break
    assert without_ids(rebuilt(found)) == without_ids(made.blocks)
    return without_ids(made.blocks)


PIECES = [CALL, SECOND, "Hello ", "wörld ", " ", "<tool", "<think>", "</think>", "{", '"name"', "é",
          '<tool_call>{"name": "other"}']  # fmt: skip
JOBS = {
    "tools": prepared(tools=TOOLS),
    "one call": prepared(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
    "no tools": prepared(),
}


@pytest.mark.parametrize("name", JOBS)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=6),
    st.lists(st.integers(1, 200), max_size=8),
    st.sampled_from(["stop", "length"]),
)
def test_blocks_do_not_depend_on_the_pieces_of_the_text(
    name: str, parts: list[str], cuts: list[int], reason: str
) -> None:
    text = "".join(parts)
    places = sorted({cut for cut in cuts if cut < len(text)})
    assert written(text, places, JOBS[name], reason) == written(text, [], JOBS[name], reason)


@in_loop
async def test_odd_values_in_the_input_are_answered_as_json() -> None:
    arguments = r'{"a": 100000000000000000000000, "b": "\u00fc\n", "c": 1.50, "d": "\ud83d\ude00"}'
    answer, _, _ = await ask(f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>', tools=TOOLS)
    (block,) = answer["content"]
    assert block["input"] == {"a": 10**23, "b": "ü\n", "c": 1.5, "d": "😀"}


# --- Errors -------------------------------------------------------------------------------------


@in_loop
async def test_error_in_a_stream_is_an_event_and_before_it_an_answer() -> None:
    app, engine = server()
    engine.executor.in_step = lambda step: engine.die() if step == 3 else None
    async with requests_to(app) as client:
        response = await client.post(PATH, json={**BODY, "stream": True})
        assert response.status_code == 200
        *_, (name, data) = events(response.text)
        dead = await client.post(PATH, json={**BODY, "stream": True})
    error = json.loads(data)
    assert name == "error"
    MessagesError.model_validate(error)
    assert error["error"]["type"] == "overloaded_error"
    assert (dead.status_code, MessagesError.model_validate(dead.json()).error.type) == (503, "overloaded_error")


@pytest.mark.parametrize(
    ("body", "status", "kind", "code"),
    [
        ({**BODY, "model": "other"}, 404, "not_found_error", "model_not_found"),
        ({**BODY, "max_token": 1}, 400, "invalid_request_error", "unknown_parameter"),
        ({**BODY, "tools": [{**TOOLS[0], "input_schema": {"type": "no such type"}}], "tool_choice": {"type": "any"}},
         400, "invalid_request_error", "invalid_parameter"),
        ([], 400, "invalid_request_error", "invalid_parameter"),
    ],
    ids=["model", "field", "schema", "list"],
)  # fmt: skip
@in_loop
async def test_errors_have_anthropics_shape(body: Any, status: int, kind: str, code: str) -> None:
    app, _ = server()
    async with requests_to(app) as client:
        for path in (PATH, f"{PATH}/count_tokens"):
            response = await client.post(path, json=body)
            if path != PATH and "tool_choice" in body:
                continue  # a schema is checked when it is used
            assert response.status_code == status
            error = MessagesError.model_validate(response.json()).error
            assert (error.type, error.details.error_code) == (kind, code)
        missing = await client.get(f"{PATH}/batches")
        method = await client.get(PATH)
        other = await client.get("/v1/message")
    assert MessagesError.model_validate(missing.json()).error.type == "not_found_error"
    assert (method.status_code, MessagesError.model_validate(method.json()).error.type) == (
        405, "invalid_request_error",
    )  # fmt: skip
    assert set(other.json()) == {"error"}, "other routes keep OpenAI's shape"


@in_loop
async def test_gate_takes_anthropics_key_and_answers_in_its_shape() -> None:
    body = {**BODY, "model": "scripted", "max_tokens": 2}
    async with serving(keys=KeyRing({"correct-horse": "ci"}), max_body_bytes=2000) as served:
        for headers, kind in (({}, "authentication_error"), ({"x-api-key": "wrong"}, "authentication_error")):
            answer = await served.answer("POST", PATH, headers=headers, body=body)
            assert (answer.status, answer.json["error"]["type"]) == (401, kind)
            assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
        good = {"x-api-key": "correct-horse", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        assert (await served.answer("POST", f"{PATH}?beta=true", headers=good, body=body)).status == 200
        assert (await served.answer("GET", "/v1/models", headers=good)).json["object"] == "list"
        assert (await served.answer("HEAD", "/", headers=good)).status == 200
        large = await served.answer("POST", PATH, headers=good, body={**body, "system": "x" * 3000})
        assert (large.status, large.json["error"]["type"]) == (413, "request_too_large")
        served.state.is_draining = True
        draining = await served.answer("POST", PATH, headers=good, body=body)
        assert (draining.status, draining.json["error"]["type"]) == (503, "overloaded_error")
        assert int(draining.headers["retry-after"]) > 0


# --- Anthropic's client -------------------------------------------------------------------------


@asynccontextmanager
async def calling(text: str) -> AsyncIterator[tuple[Callable[[Callable[[Any], Any]], Any], FakeEngine]]:
    """Return a function that runs another in a thread with a strict client, and the engine."""
    import anthropic

    app, engine = server(text)

    async with listening(app) as url:

        async def run(use: Callable[[Any], Any]) -> Any:
            settings: Any = {"api_key": "any", "max_retries": 0, "_strict_response_validation": True}
            with anthropic.Anthropic(base_url=url, **settings) as client:
                return await asyncio.to_thread(use, client)

        yield run, engine


@in_loop
async def test_client_creates_streams_and_counts() -> None:
    def use(client: Any) -> Any:
        asked: Any = {"model": MODEL, "max_tokens": 100, "messages": HI, "metadata": {"user_id": "me"}}
        whole = client.messages.create(
            **asked, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        )
        with client.messages.create(**asked, stream=True) as stream:
            kinds = [event.type for event in stream]
        with client.messages.stream(**asked) as helper:
            pieces = list(helper.text_stream)
            final = helper.get_final_message()
        beta = client.beta.messages.create(**asked, betas=["context-1m-2025-08-07"])
        counted = client.messages.count_tokens(model=MODEL, messages=HI)
        return whole, kinds, pieces, final, beta, counted

    async with calling(TEXT) as (run, engine):
        whole, kinds, pieces, final, beta, counted = await run(use)
    assert whole.content[0].text == final.content[0].text == beta.content[0].text == "".join(pieces) == TEXT
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 13
    assert said(engine.submitted[0]).startswith("[system]Be brief.")
    assert counted.input_tokens == engine.submitted[1].num_prompt_tokens


@in_loop
async def test_client_sends_an_answer_back_unchanged_with_the_results() -> None:
    def use(client: Any) -> Any:
        asked: Any = {"model": MODEL, "max_tokens": 300, "tools": TOOLS}
        with client.messages.stream(messages=HI, **asked) as helper:
            kinds = {event.type for event in helper}
            first = helper.get_final_message()
        call = first.content[-1]
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
        for content in (first.content, [block.model_dump() for block in first.content]):
            more: Any = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
            client.messages.create(messages=[*HI, *more], **asked)
        return kinds, first

    async with calling(SAYS) as (run, engine):
        kinds, first = await run(use)
    assert {"thinking", "signature", "text", "input_json"} <= kinds
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[-1].input == {"city": "Orléans"}
    for request in engine.submitted[1:]:
        assert said(request).endswith(
            '[assistant]<think>Rome?</think>Let me see.<tool_call>weather{"city": "Orléans"}[tool]sunny[assistant]'
        )
    prompts = [request.prompt_token_ids for request in engine.submitted]
    assert prompts[1] == prompts[2]
    assert prompts[1][: len(prompts[0])] == prompts[0], "the prefix stays"


@in_loop
async def test_clients_tool_runner_runs_the_loop() -> None:
    import anthropic

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        return f"sunny in {city}"

    def use(client: Any) -> Any:
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=300, messages=HI, tools=[weather], max_iterations=2
        )
        return list(runner)

    async with calling(SAYS) as (run, engine):
        answers = await run(use)
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use"]
    assert "[tool]sunny in Orléans" in said(engine.submitted[1])


@in_loop
async def test_client_raises_its_own_errors() -> None:
    import anthropic

    def use(client: Any) -> Any:
        asked: Any = {"model": MODEL, "max_tokens": 100, "messages": HI}
        with pytest.raises(anthropic.BadRequestError) as bad:
            client.messages.create(**asked, extra_body={"temperature": 9})
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(**{**asked, "model": "other"})
        image_block = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        with pytest.raises(anthropic.BadRequestError) as image:
            client.messages.create(**{**asked, "messages": [{"role": "user", "content": [image_block]}]})
        with pytest.raises(anthropic.BadRequestError) as search:
            client.messages.create(**asked, tools=[{"type": "web_search_20250305", "name": "web_search"}])
        return bad.value, missing.value, image.value, search.value

    async with calling(TEXT) as (run, _):
        bad, missing, image, search = await run(use)
    assert (bad.type, bad.error_code) == ("invalid_request_error", "invalid_parameter")
    assert "temperature" in bad.message
    assert (missing.type, missing.error_code) == ("not_found_error", "model_not_found")
    assert "reads text only" in image.message
    assert "web_search" in search.message


@in_loop
async def test_client_sees_an_error_in_a_stream() -> None:
    import anthropic

    def use(client: Any) -> Any:
        stream = client.messages.create(model=MODEL, max_tokens=100, messages=HI, stream=True)
        with pytest.raises(anthropic.APIStatusError) as caught, stream:
            list(stream)
        return caught.value

    async with calling(TEXT) as (run, engine):
        engine.executor.in_step = lambda step: engine.die() if step == 4 else None
        error = await run(use)
    assert error.type == "overloaded_error"
    assert "ended unexpectedly" in error.message


@pytest.mark.model
def test_real_model_answers_counts_and_finds_its_prompt_cached(smollm2_path: Any) -> None:
    import anthropic

    question = {"role": "user", "content": "What is the capital of France?"}
    system = "You answer in one short sentence, without any further explanation."
    asked: Any = {"model": "smollm2", "messages": [question], "system": system}
    with (
        serving_model(smollm2_path, name="smollm2") as running,
        anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0) as client,
    ):
        counted = client.messages.count_tokens(**asked)
        asked |= {"max_tokens": 30, "extra_body": {"temperature": 0}}
        first = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            again = stream.get_final_message()
    assert "Paris" in first.content[0].text
    assert first.content[0].text == again.content[0].text
    assert counted.input_tokens == first.usage.input_tokens
    assert again.usage.cache_read_input_tokens > 0
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == counted.input_tokens
