"""`/v1/chat/completions`, answered whole."""

import asyncio
import json
from typing import Any

import pytest

from quire.server.protocol.chat import ChatCompletion, ChatRequest
from quire.server.protocol.validation import validate
from quire.server.request_record import Caller
from quire.server.routes.chat import message_dicts, prepare_chat
from tests.engine.builders import saying
from tests.server.fake_engine import CHAT, MESSAGES, assert_error, in_loop, make_server, post, requests_to, use_template

PATH = "/v1/chat/completions"
THINKING = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


async def ask(fields: dict[str, Any], text: str = "Hello wörld", **settings: Any) -> dict[str, Any]:
    """Send CHAT with these fields; checks that the answer is good and has its schema."""
    app, engine = make_server(next_token=saying(text), **settings)
    response = await post(app, PATH, {**CHAT, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    ChatCompletion.model_validate(answer)
    assert engine.num_requests == 0
    return answer


@in_loop
async def test_answer_has_text_finish_reason_usage_and_timings() -> None:
    answer = await ask({})
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello wörld", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    # "<user>hi<assistant>" is 4 tokens; each byte of the answer is one, and the end.
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 13
    assert answer["timings"]["predicted_n"] == 13
    assert answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == 4


@in_loop
async def test_stop_strings_and_tokens_say_what_matched() -> None:
    (choice,) = (await ask({"stop": ["wö", "x"]}))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello ", "stop", "wö")
    (choice,) = (await ask({"stop_token_ids": [ord("o")]}))["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("Hell", ord("o"))
    (choice,) = (await ask({"stop": "lo", "include_stop_str_in_output": True}))["choices"]
    assert choice["message"]["content"] == "Hello"


@in_loop
async def test_log_probabilities_of_the_prompt() -> None:
    answer = await ask({"prompt_logprobs": 1, "max_tokens": 1, "return_token_ids": True})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == 4
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1]["104"]["decoded_token"] == "h"
    assert answer["prompt_token_ids"][1:3] == [104, 105]
    assert answer["choices"][0]["token_ids"] == [72]


@in_loop
async def test_tokens_as_ids() -> None:
    answer = await ask({"logprobs": True, "return_tokens_as_token_ids": True, "max_tokens": 1})
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:72"


@in_loop
async def test_message_is_continued_and_echoed() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "Sure: "}]}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True, "return_token_ids": True}
    answer = await ask(fields)
    assert answer["choices"][0]["message"]["content"] == "Sure: Hello wörld"
    # The prompt ends with the message itself, not with the beginning of another turn.
    assert bytes(answer["prompt_token_ids"][-6:]) == b"Sure: "


@in_loop
async def test_answer_goes_on_behind_given_tokens() -> None:
    answer = await ask({"answer_token_ids": [list(b"Well, ")], "return_token_ids": True})
    assert answer["choices"][0]["message"]["content"] == "Hello wörld"
    assert bytes(answer["prompt_token_ids"][-6:]) == b"Well, "
    assert answer["usage"]["prompt_tokens"] == 4 + 6


@in_loop
async def test_reasoning_begun_by_given_tokens_goes_on() -> None:
    app, _ = make_server(next_token=saying(" second</think>Yes."))
    use_template(app, THINKING)
    fields = {"answer_token_ids": [list(b"<think>First")], "messages": MESSAGES}
    message = (await post(app, PATH, {**CHAT, **fields})).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" second", "Yes.")


@in_loop
async def test_each_beginning_has_an_answer_of_its_own() -> None:
    beginnings = [list(b"<think>First"), list(b"Plain, ")]
    app, engine = make_server(next_token=saying(" and</think>Yes."))
    use_template(app, THINKING)
    body = {**CHAT, "answer_token_ids": beginnings, "n": 2}
    choices = (await post(app, PATH, body)).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    whole = [choice["message"]["content"] for choice in choices]
    assert whole == ["Yes.", "Yes.", " and</think>Yes.", " and</think>Yes."]
    lines = (await post(app, PATH, {**body, "stream": True})).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    contents = ["", "", "", ""]
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        contents[choice["index"]] += choice["delta"].get("content") or ""
    assert contents == whole
    assert engine.num_requests == 0


@in_loop
async def test_constrained_answer_cannot_begin_with_given_tokens() -> None:
    app, _ = make_server()
    fields = {"answer_token_ids": [[65]], "structured_outputs": {"regex": "A+"}}
    assert_error(await post(app, PATH, {**CHAT, **fields}), 400, "invalid_parameter", "answer_token_ids")


@in_loop
async def test_truncation_keeps_the_end_or_the_start_of_the_prompt() -> None:
    answer = await ask({"truncate_prompt_tokens": 2, "return_token_ids": True})
    assert len(answer["prompt_token_ids"]) == 2
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "truncated_tokens": 2}
    other = await ask({"truncate_prompt_tokens": 2, "truncation_side": "right", "return_token_ids": True})
    whole = await ask({"return_token_ids": True})
    assert other["prompt_token_ids"] + answer["prompt_token_ids"] == whole["prompt_token_ids"]
    long = {"messages": [{"role": "user", "content": "x" * 500}]}
    answer = await ask({**long, "truncate_prompt_tokens": -1, "max_tokens": 8})
    assert answer["usage"]["prompt_tokens"] == 120


@in_loop
async def test_usage_has_cached_tokens() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        body = {**CHAT, "messages": [{"role": "user", "content": "x" * 20}], "max_tokens": 1}
        await client.post(PATH, json=body)
        answer = (await client.post(PATH, json=body)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 20
    assert answer["timings"]["cache_n"] == 20
    answer = (await post(app, PATH, {**body, "cache_salt": "mine"})).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@in_loop
async def test_request_id_is_in_the_answer_but_not_in_the_engine() -> None:
    app, engine = make_server()
    answers = [(await post(app, PATH, {**CHAT, "request_id": "mine"})).json() for _ in range(2)]
    assert [answer["id"] for answer in answers] == ["chatcmpl-mine"] * 2
    assert len({request.request_id for request in engine.submitted}) == 2


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": [{"role": "user"}]}, "invalid_parameter", "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "context_length_exceeded", None),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "context_length_exceeded", None),
        ({"n": 2, "temperature": 0}, "invalid_parameter", "n"),
        ({"stop_token_ids": [999]}, "invalid_parameter", "stop_token_ids"),
        ({"logit_bias": {"999": 1}}, "invalid_parameter", "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "invalid_parameter", "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "invalid_parameter", "truncate_prompt_tokens"),
        ({"priority": 1}, "invalid_parameter", "priority"),
        ({"chat_template_kwargs": {"a": [[[]]]}, "documents": [{"text": 1}], "n": 99}, "invalid_parameter", "n"),
    ],
)
@in_loop
async def test_field_that_the_model_refuses_is_named(fields: dict[str, Any], code: str, param: str | None) -> None:
    app, engine = make_server()
    assert_error(await post(app, PATH, {**CHAT, **fields}), 400, code, param)
    assert engine.submitted == []


@in_loop
async def test_error_about_log_probabilities_names_top_logprobs() -> None:
    app, _ = make_server(options={"max_logprobs": 3})
    async with requests_to(app) as client:
        response = await client.post(PATH, json={**CHAT, "logprobs": True, "top_logprobs": 4})
        assert_error(response, 400, "invalid_parameter", "top_logprobs")


@in_loop
async def test_engine_that_dies_is_a_503_and_a_failed_request_a_500() -> None:
    app, engine = make_server()
    engine.executor.in_step = lambda step: engine.die() if step == 2 else None
    async with requests_to(app) as client:
        assert_error(await client.post(PATH, json=CHAT), 503, "engine_dead")
        assert_error(await client.post(PATH, json=CHAT), 503, "engine_dead")
    app, engine = make_server()

    class EveryRequest(dict[str, str]):
        def get(self, key: str, default: object = None) -> str:  # type: ignore[override]
            return "the logits of this request are not finite"

    engine.executor.errors = EveryRequest()
    message = assert_error(await post(app, PATH, CHAT), 500, "generation_failed")
    assert "not finite" in message


def test_dialogue_gets_the_known_keys_of_messages() -> None:
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "name": "Ann"},
        {"role": "assistant", "content": None, "annotations": [], "thinking": "Hm.", "stop_reason": None},
    ]
    assert message_dicts(validate(ChatRequest, {**CHAT, "messages": sent}).messages) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Ann"},
        {"role": "assistant", "reasoning": "Hm."},
    ]


def test_request_has_the_callers_identity_and_the_structured_output() -> None:
    state = make_server()[0].state.quire
    fields = {"structured_outputs": {"choice": ["a"]}, "cache_salt": "own"}
    body = validate(ChatRequest, {**CHAT, **fields})
    (request,) = asyncio.run(prepare_chat(state, body, Caller("ann", "salt"))).requests
    assert (request.client_id, request.hash_extras) == ("ann", ("saltown",))
    assert request.sampling is not None
    assert request.sampling.structured_outputs is not None
    assert request.sampling.structured_outputs.choice == ("a",)
