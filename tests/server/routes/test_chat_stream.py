"""`/v1/chat/completions` as a stream."""

from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from quire.server.protocol.answers import FINGERPRINT
from tests.engine.builders import saying
from tests.server.fake_engine import (
    CHAT,
    assert_error,
    chunks,
    events,
    in_loop,
    make_server,
    post,
    requests_to,
)

PATH = "/v1/chat/completions"


async def stream(fields: dict[str, Any], text: str = "Hello wörld", **settings: Any) -> list[dict[str, Any]]:
    """Return the chunks of a good stream; checks each against the type of OpenAI's client."""
    app, engine = make_server(next_token=saying(text), **settings)
    response = await post(app, PATH, {**CHAT, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    found = chunks(response.text)
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert {chunk["system_fingerprint"] for chunk in found} == {FINGERPRINT}
    assert len({(chunk["id"], chunk["created"]) for chunk in found}) == 1
    assert engine.num_requests == 0
    return found


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@in_loop
async def test_role_then_text_then_end() -> None:
    first, *middle, last = await stream({})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(middle) == "Hello wörld"
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} and text_of([chunk]) for chunk in middle)
    assert len(middle) == 11, "a chunk per character: half of one is never sent"
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert last["timings"]["predicted_n"] == 13
    assert "usage" not in last


@pytest.mark.parametrize("text", ['quote " back \\ line \n tab \t \x01 \u2028 é 🎈', "data: [DONE]\n\ndata: x"])
@in_loop
async def test_any_text_is_streamed_unchanged(text: str) -> None:
    assert text_of(await stream({"max_tokens": 100}, text)) == text


@in_loop
async def test_usage_comes_last_and_is_null_before() -> None:
    *others, last = await stream({"stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (4, 13)
    assert last["timings"]["predicted_n"] == 13
    assert all("timings" not in chunk for chunk in others)


@in_loop
async def test_continuous_usage_is_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = await stream({"stream_options": options, "max_tokens": 4})
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == [0, 1, 2, 3, 4, 4, 4]
    (found) = await stream({"stream_options": {"continuous_usage_stats": True}, "max_tokens": 4})
    assert all("usage" not in chunk for chunk in found), "only together with include_usage"


@in_loop
async def test_each_choice_has_its_role_its_text_and_its_end() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        body = {**CHAT, "n": 3, "max_tokens": 6, "seed": 1, "ignore_eos": True}
        whole = (await client.post(PATH, json=body)).json()
        found = chunks((await client.post(PATH, json={**body, "stream": True})).text)
    for index in range(3):
        assert text_of(found, index) == whole["choices"][index]["message"]["content"]
        mine = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]


@in_loop
async def test_log_probabilities_and_ids_are_those_of_the_whole_answer() -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "max_tokens": 8}
    app, _ = make_server(next_token=saying("Hello wörld"))
    whole = (await post(app, PATH, {**CHAT, **fields})).json()
    found = await stream(fields)
    choices = [chunk["choices"][0] for chunk in found]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    assert token_ids == whole["choices"][0]["token_ids"]
    assert found[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in found[1:])


@in_loop
async def test_error_before_the_first_token_is_an_ordinary_answer() -> None:
    app, engine = make_server()
    engine.die()
    async with requests_to(app) as client:
        assert_error(await client.post(PATH, json={**CHAT, "stream": True}), 503, "engine_dead")
        long = [{"role": "user", "content": "x" * 300}]
        response = await client.post(PATH, json={**CHAT, "stream": True, "messages": long})
        assert_error(response, 400, "context_length_exceeded")


@in_loop
async def test_error_after_the_first_token_is_an_event_and_the_stream_ends_as_always() -> None:
    app, engine = make_server(next_token=saying("Hello"))
    engine.executor.in_step = lambda step: engine.die() if step == 4 else None
    response = await post(app, PATH, {**CHAT, "stream": True})
    assert response.status_code == 200
    *before, error = chunks(response.text)
    assert text_of(before) == "Hel"
    assert error["error"]["code"] == "engine_dead"
    assert len(list(events(response.text))) == len(before) + 2
