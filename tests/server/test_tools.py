"""Tools in a chat, from the request to the calls of the answer."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from quire.server.protocol.chat import ChatCompletion
from tests.engine.builders import saying
from tests.server.fake_engine import CHAT, chunks, in_loop, make_server, requests_to

PATH = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '{"name": "weather", "arguments": {"city": "Orléans"}}'
BOTH = f'[{CALL}, {{"name": "now", "arguments": {{}}}}]'
LONG = {"num_blocks": 2000, "max_model_len": 2048, "max_num_batched_tokens": 2048}
"""The description of tools is longer than the context of the other tests."""


async def ask(text: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Return the choice of a whole answer, those of a streamed one, and what the engine was sent."""
    app, engine = make_server(next_token=saying(text), **LONG)
    async with requests_to(app) as client:
        body = {**CHAT, "tools": TOOLS, **fields}
        whole = await client.post(PATH, json=body)
        assert whole.status_code == 200, whole.text
        ChatCompletion.model_validate(whole.json())
        streamed = chunks((await client.post(PATH, json={**body, "stream": True})).text)
    for chunk in streamed:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return whole.json()["choices"][0], [chunk["choices"][0] for chunk in streamed], engine.submitted[0]


def joined(choices: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and names and arguments of the calls, of a stream."""
    content, calls = "", {}
    for choice in choices:
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            found = calls.setdefault(call["index"], ["", ""])
            found[0] += call["function"].get("name", "")
            found[1] += call["function"]["arguments"]
    return content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"return_token_ids": True}], ids=str)
@in_loop
async def test_calls_whole_and_streamed(fields: dict[str, Any]) -> None:
    whole, streamed, request = await ask(BOTH, **fields)
    message = whole["message"]
    assert (message["content"], whole["finish_reason"]) == (None, "tool_calls")
    called = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert called == [("weather", {"city": "Orléans"}), ("now", {})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    content, calls = joined(streamed)
    assert (content, [(name, json.loads(arguments)) for name, arguments in calls]) == ("", called)
    assert streamed[-1]["finish_reason"] == "tool_calls"
    assert sum(len(choice.get("token_ids", ())) for choice in streamed) == len(whole.get("token_ids", ()))
    assert "Weather of a city" in bytes(token for token in request.prompt_token_ids if token < 256).decode()
    assert request.sampling.structured_outputs is None


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
@in_loop
async def test_demanded_call_is_structured_output(choice: Any, reason: str) -> None:
    text = CALL if choice is NAMED else f"[{CALL}]"
    whole, streamed, request = await ask(text, tool_choice=choice)
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert whole["finish_reason"] == streamed[-1]["finish_reason"] == reason
    assert "weather" in request.sampling.structured_outputs.text
    assert ("now" in request.sampling.structured_outputs.text) == (choice == "required")


@in_loop
async def test_without_parallel_calls_only_the_first_is_kept() -> None:
    whole, streamed, _ = await ask(BOTH, parallel_tool_calls=False)
    assert len(whole["message"]["tool_calls"]) == 1
    assert [name for name, _ in joined(streamed)[1]] == ["weather"]


@in_loop
async def test_call_that_is_cut_off_is_content_and_ends_with_length() -> None:
    whole, streamed, _ = await ask(CALL, max_tokens=40)
    assert whole["finish_reason"] == streamed[-1]["finish_reason"] == "length"
    assert whole["message"]["content"] == joined(streamed)[0] == CALL[:40]
    assert "tool_calls" not in whole["message"]


@pytest.mark.parametrize(("choice", "max_tokens"), [("required", 3), (NAMED, 5)])
@in_loop
async def test_demanded_call_that_is_cut_off_is_content(choice: Any, max_tokens: int) -> None:
    text = CALL if choice is NAMED else f"[{CALL}]"
    whole, streamed, _ = await ask(text, tool_choice=choice, max_tokens=max_tokens)
    assert (whole["message"]["content"], whole["finish_reason"]) == (text[:max_tokens], "length")
    assert joined(streamed) == (text[:max_tokens], [])


@in_loop
async def test_demanded_call_overrides_response_format() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": {"enum": ["crimson"]}}}
    whole, _, request = await ask(f"[{CALL}]", tool_choice="required", response_format=form)
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert "crimson" not in request.sampling.structured_outputs.text
