"""Tools in a chat, from the request to the calls of the answer."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from quire.server.protocol.chat import ChatCompletion
from quire.server.tools import messages_with_tools
from quire.text.chat_template import ChatTemplate
from quire.text.tool_calls.formats import choose_format
from tests.engine.builders import CHAT_TEMPLATE, saying
from tests.server.fake_engine import CHAT, chunks, in_loop, make_server, requests_to
from tests.text.tool_calls.builders import parse

PATH = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '{"name": "weather", "arguments": {"city": "Orléans"}}'
BOTH = f'[{CALL}, {{"name": "now", "arguments": {{}}}}]'
KNOWS_TOOLS = "{% if tools %}<tool_call>{% endif %}"
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
async def test_call_that_is_cut_off_ends_with_length() -> None:
    whole, streamed, _ = await ask(CALL, max_tokens=40)
    assert whole["finish_reason"] == streamed[-1]["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == joined(streamed)[1][0][1]


@pytest.mark.parametrize(("choice", "max_tokens"), [("required", 3), (NAMED, 5)])
@in_loop
async def test_demanded_call_that_is_cut_off_before_its_name_leaves_no_text(choice: Any, max_tokens: int) -> None:
    text = CALL if choice is NAMED else f"[{CALL}]"
    whole, streamed, _ = await ask(text, tool_choice=choice, max_tokens=max_tokens)
    assert (whole["message"]["content"], whole["finish_reason"]) == ("", "length")
    assert joined(streamed) == ("", [])


@in_loop
async def test_demanded_call_overrides_response_format() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": {"enum": ["crimson"]}}}
    whole, _, request = await ask(f"[{CALL}]", tool_choice="required", response_format=form)
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert "crimson" not in request.sampling.structured_outputs.text


def conversation() -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]


def test_template_that_reads_tools_gets_arguments_as_objects() -> None:
    messages = messages_with_tools(KNOWS_TOOLS, conversation(), TOOLS)
    assert messages[0]["content"] == "Be brief."
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}


def test_other_templates_get_tools_and_calls_as_text() -> None:
    system, _, assistant, _ = messages_with_tools(CHAT_TEMPLATE, conversation(), TOOLS)
    assert system["content"].startswith("Be brief.\n\n")
    assert '"weather"' in system["content"]
    assert json.loads(assistant["content"]) == {"name": "weather", "arguments": {"city": "Rome"}}
    assert "tool_calls" not in assistant
    first, *_ = messages_with_tools(CHAT_TEMPLATE, conversation()[1:], TOOLS)
    assert first["role"] == "system"
    assert messages_with_tools(CHAT_TEMPLATE, conversation()[:2], None) == conversation()[:2]


V3_CALL = "'<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' + " \
    "call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>'"  # fmt: skip
V31_CALL = "'<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] + " \
    "'<｜tool▁call▁end｜>'"  # fmt: skip
DEEPSEEK = (
    "{% for m in messages %}{% if m['tool_calls'] %}§{{ m['content'] or '' }}<｜tool▁calls▁begin｜>{% for call in "
    "m['tool_calls'] %}{{ CALL }}{% endfor %}<｜tool▁calls▁end｜>§{% else %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% endif %}{% endfor %}"
)
GLM_45 = (
    "{% if tools %}<tool_call>{name}{% endif %}{% for m in messages %}{% if m.tool_calls %}§{{ m.content or '' }}"
    "{% for call in m.tool_calls %}\n<tool_call>{{ call.function.name }}\n"
    "{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}§{% else %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
GLM_4 = (
    "[gMASK]<sop>{% if tools %}{% endif %}{% for m in messages %}{% if m.metadata %}{% if not loop.previtem.metadata %}"
    "§{% endif %}<|assistant|>{{ m.metadata }}\n{{ m.content }}{% if not loop.nextitem.metadata %}§{% endif %}"
    "{% elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{% else %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (DEEPSEEK.replace("CALL", V3_CALL), "Yes."), (DEEPSEEK.replace("CALL", V31_CALL), "Yes."), (GLM_45, "Yes."),
        (GLM_4, None),
    ],
    ids=["DeepSeek-V3", "DeepSeek-V3.1", "GLM-4.5", "GLM-4"],
)  # fmt: skip
def test_calls_in_a_rendered_history_are_parsed_as_they_were(template: str, content: str | None) -> None:
    written = [("weather", {"city": "Orléans\n"}), ("now", {})]
    calls = [
        {"id": str(index), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(written)
    ]
    system, user, _, answer = conversation()
    history = [system, user, {"role": "assistant", "content": content, "tool_calls": calls}, answer]
    messages = messages_with_tools(template, history, TOOLS)
    text = ChatTemplate(template).render(messages, tools=TOOLS)
    _, turn, rest = text.split("§")
    assert "sunny" in rest
    for pieces in ([turn], list(turn)):
        found = parse(choose_format(template), pieces, tool_names={"weather", "now"})
        assert found.content == (content or "")
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == written


def test_deepseek_is_told_its_own_format() -> None:
    """Its template writes calls, but does not describe tools."""
    template = DEEPSEEK.replace("CALL", V31_CALL)
    system, *_ = messages_with_tools(template, conversation(), TOOLS)
    example = system["content"].splitlines()[-1].replace("<name>", "weather")
    found = parse(choose_format(template), [example], tool_names={"weather"})
    assert found.calls == [("weather", '{"<argument>": "<value>"}')]
    assert '"weather"' in system["content"]


def test_result_of_a_tool_is_an_observation_to_glm_4() -> None:
    *_, call, answer = messages_with_tools(GLM_4, conversation(), TOOLS)
    assert call == {"role": "assistant", "metadata": "weather", "content": '{"city": "Rome"}'}
    assert (answer["role"], answer["content"]) == ("observation", "sunny")
