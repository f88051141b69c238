"""Reasoning is apart from the answer: in messages, streams and responses, beside tools, and off where asked."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from quire.server.options import ServerOptions
from quire.server.protocol.chat import ChatCompletion
from quire.server.protocol.responses import ResponseObject
from tests.engine.builders import saying
from tests.server.fake_engine import CHAT, chunks, in_loop, listening, make_server, post, use_template

THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TEXT = "<think>\n2 and 2.\n</think>\n\nFour."
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
PATH = "/v1/chat/completions"


def server(text: str = TEXT, template: str = THINKS, **options: Any) -> Any:
    app, _ = make_server(next_token=saying(text), num_blocks=2000, max_model_len=2048, max_num_batched_tokens=2048)
    app.state.quire.options = ServerOptions(**options)
    use_template(app, template)
    return app


async def message(fields: dict[str, Any], **settings: Any) -> dict[str, Any]:
    response = await post(server(**settings), PATH, {**CHAT, "max_tokens": 200, **fields})
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json())
    return dict(response.json()["choices"][0]["message"])


@in_loop
async def test_message_has_reasoning_and_content() -> None:
    found = await message({})
    assert (found["reasoning_content"], found["content"]) == ("2 and 2.", "Four.")
    assert found["reasoning"] == found["reasoning_content"]


@in_loop
async def test_stream_has_the_same_deltas_apart() -> None:
    response = await post(server(), PATH, {**CHAT, "max_tokens": 200, "stream": True})
    found = chunks(response.text)
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "2 and 2."
    assert "".join(delta.get("content", "") for delta in deltas) == "Four."


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"include_reasoning": False}, "Four."),
        ({"reasoning_effort": "none"}, TEXT),  # the template closes the reasoning itself
        ({"chat_template_kwargs": {"enable_thinking": False}}, TEXT),
    ],
)
@in_loop
async def test_reasoning_can_be_left_out(fields: dict[str, Any], content: str) -> None:
    found = await message(fields)
    assert "reasoning_content" not in found
    assert found["content"] == content


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high"])
@in_loop
async def test_effort_reaches_the_template(effort: str) -> None:
    app, engine = make_server(next_token=saying(TEXT), num_blocks=2000, max_model_len=2048, max_num_batched_tokens=2048)
    use_template(app, "{{ reasoning_effort }}, {{ enable_thinking }}")
    for body in ({"reasoning_effort": effort}, {"chat_template_kwargs": {"reasoning_effort": effort}}):
        assert (await post(app, PATH, {**CHAT, "max_tokens": 2, **body})).status_code == 200
    own, given = (bytes(request.prompt_token_ids).decode() for request in engine.submitted)
    assert own == f"{effort}, {effort != 'none'}"
    assert given == f"{effort}, "


@in_loop
async def test_server_and_templates_without_reasoning_leave_the_text_as_it_is() -> None:
    assert (await message({}, reasoning_format="none"))["content"] == TEXT
    assert (await message({}, template="{% for m in messages %}{{ m.content }}{% endfor %}"))["content"] == TEXT


@in_loop
async def test_prompt_that_ends_inside_the_reasoning_is_continued() -> None:
    template = THINKS.replace("assistant: ", "assistant: <think>\n")
    found = await message({}, text="Hm.</think>Four.", template=template)
    assert (found["reasoning_content"], found["content"]) == ("Hm.", "Four.")


@in_loop
async def test_call_behind_the_reasoning_is_a_call() -> None:
    found = await message({"tools": [TOOL]}, text=f"<think>I need {CALL}?</think>{CALL}")
    assert found["reasoning_content"] == f"I need {CALL}?"
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["weather"]


@in_loop
async def test_gemma4s_reasoning_and_call_are_read() -> None:
    template = "{% if tools %}<|tool_call>call:…<tool_call|><|channel>thought…<channel|>{% endif %}" + THINKS
    template = template.replace("<think>\n\n</think>\n\n", "")
    call = '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>'
    for closing in ("<channel|>", ""):
        found = await message({"tools": [TOOL]}, text=f"<|channel>thought\nRome?\n{closing}{call}", template=template)
        ((name, arguments),) = (each["function"].values() for each in found["tool_calls"])
        assert (found["reasoning_content"], name, json.loads(arguments)) == (
            "Rome?", "weather", {"city": "Rome", "days": [1, 2]},
        )  # fmt: skip


@in_loop
async def test_calls_of_gpt_oss_and_qwen35_are_read_behind_their_reasoning() -> None:
    typed = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", **typed}}}
    gpt_oss = "<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant<|channel|>commentary to=functions.weather"
    qwen = "<think>\nRome?\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\n7\n</parameter>\n"
    cases = (
        ("{% if tools %}<|channel|>analysis<|message|><|channel|>commentary{% endif %}",
         gpt_oss + ' <|constrain|>json<|message|>{"city": "7", "days": 2}'),
        ("{% if tools %}<tool_call><function=x></tool_call></think>{% endif %}",
         qwen + "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"),
    )  # fmt: skip
    for template, text in cases:
        found = await message({"tools": [tool]}, text=text, template=template + PLAIN)
        ((name, arguments),) = (each["function"].values() for each in found["tool_calls"])
        assert (found["reasoning"], found["content"], name) == ("Rome?", None, "weather")
        assert json.loads(arguments) == {"city": "7", "days": 2}


@in_loop
async def test_structured_output_is_all_content() -> None:
    found = await message({"response_format": {"type": "json_object"}}, text='{"a": "</think>"}')
    assert json.loads(found["content"]) == {"a": "</think>"}


@in_loop
async def test_response_begins_with_a_reasoning_item() -> None:
    body = {"model": CHAT["model"], "input": "Hi", "max_output_tokens": 200}
    answer = (await post(server(), "/v1/responses", body)).json()
    ResponseObject.model_validate(answer)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert [item["content"][0]["text"] for item in answer["output"]] == ["2 and 2.", "Four."]


@in_loop
async def test_openais_client_reads_a_stream_of_responses() -> None:
    async with listening(server()) as url:
        settings: dict[str, Any] = {"base_url": url + "/v1", "api_key": "any", "_strict_response_validation": True}
        async with openai.AsyncOpenAI(**settings) as client:
            events = [
                event async for event in await client.responses.create(model=CHAT["model"], input="Hi", stream=True)
            ]
    kinds = [event.type for event in events]
    text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert text == "2 and 2."
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert events[-1].response.output_text == "Four."
