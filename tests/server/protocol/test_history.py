"""Messages of histories as clients send them: answers of this and of other servers, and their normal form."""

from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.prompts import TokenizeRequest
from quire.server.protocol.validation import validate

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def normal(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages as a dialogue gets them, from both routes that take some."""
    chat = validate(ChatRequest, {"messages": list(messages)}).messages
    assert validate(TokenizeRequest, {"messages": list(messages)}).messages == chat
    return [message.model_dump(exclude_none=True) for message in chat]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"content": "x", "refusal": None, "annotations": [], "audio": None, "function_call": None, "parsed": None},
         {"content": "x"}),
        ({"content": "x", "id": "msg_1", "type": "message", "status": "completed", "index": 0, "finish_reason": "stop",
          "stop_reason": None, "token_ids": [1], "logprobs": None, "provider_specific_fields": {"a": 1}},
         {"content": "x"}),
        ({"content": "x", "tool_calls": []}, {"content": "x"}),
        ({"content": "x", "tool_calls": None, "cache_control": {"type": "ephemeral"}}, {"content": "x"}),
        ({"content": None, "tool_calls": [{**CALL, "index": 0, "cache_control": {}, "provider_specific_fields": None,
          "function": {**CALL["function"], "parsed_arguments": {}}}]}, {"tool_calls": [CALL]}),
        ({"content": "", "tool_calls": [{"id": "call_1", "function": {"name": "now", "arguments": {"a": "ü"}}}]},
         {"content": "", "tool_calls": [{**CALL, "function": {"name": "now", "arguments": '{"a": "ü"}'}}]}),
        ({"content": "", "tool_calls": [{"id": "call_1", "function": {"name": "now", "arguments": None}}]},
         {"content": "", "tool_calls": [{**CALL, "function": {"name": "now", "arguments": ""}}]}),
        ({"tool_calls": [{"function": {"name": "now"}}]},
         {"tool_calls": [{**CALL, "id": "call_1_0", "function": {"name": "now", "arguments": ""}}]}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": "Well.", "refusal": "No."},
         {"content": [{"type": "text", "text": "Well."}, {"type": "text", "text": "No."}]}),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": [{"type": "text", "text": "No."}]}),
        ({"content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
                      {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
         {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
        ({"content": "x", "name": "Bot"}, {"content": "x", "name": "Bot"}),
    ],
)  # fmt: skip
def test_answer_sent_back_has_its_known_keys_only(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    assert normal(USER, {"role": "assistant", **sent}) == [USER, {"role": "assistant", **expected}]


@pytest.mark.parametrize(
    "sent",
    [
        {"content": "x", "reasoning": "Hm."},
        {"content": "x", "reasoning_content": "Hm."},
        {"content": "x", "reasoning": "Hm.", "reasoning_content": "Hm."},
        {"content": "x", "thinking": "Hm."},
        {"content": "x", "reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "signature": "s"}]},
        {"content": "x", "reasoning_details": [{"type": "reasoning.encrypted", "data": "s"},
                                               {"type": "reasoning.summary", "summary": "Hm."}]},
        {"content": "x", "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
        {"content": "x", "reasoning_content": "Hm.", "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]},
    ],
)  # fmt: skip
def test_reasoning_has_one_name(sent: dict[str, Any]) -> None:
    assert normal(USER, {"role": "assistant", **sent})[1] == {"role": "assistant", "content": "x", "reasoning": "Hm."}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "reasoning", "reasoning": "Hm."},
        {"type": "reasoning", "text": "Hm."},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "reasoning_content", "reasoning_content": {"text": "Hm.", "signature": "s"}},
    ],
)
def test_reasoning_among_the_parts_is_reasoning_of_the_assistant(part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "x"}
    turn = {"role": "assistant", "content": [part, {"type": "redacted_thinking", "data": "s"}, text]}
    assert normal(USER, turn)[1] == {"role": "assistant", "content": [text], "reasoning": "Hm."}
    assert normal(USER, {**turn, "content": [part]})[1] == {"role": "assistant", "reasoning": "Hm."}
    for role in ("user", "system", "tool"):
        with pytest.raises(ApiError) as caught:
            validate(ChatRequest, {"messages": [{**turn, "role": role}]})
        assert caught.value.param == "messages.0.content"


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_content_as_parts_is_accepted_for_every_role(role: str) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    (found,) = normal({"role": role, "content": parts})
    assert found["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_older_function_call_and_its_result_are_a_tool_call_with_an_id() -> None:
    call = {"name": "now", "arguments": "{}"}
    turns = (
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "now", "content": "12:00"},
    )
    found = normal(USER, *turns, *turns)
    assert found[1:3] == [
        {"role": "assistant", "tool_calls": [{"id": "call_1_0", "type": "function", "function": call}]},
        {"role": "tool", "name": "now", "tool_call_id": "call_1_0", "content": "12:00"},
    ]
    assert found[3]["tool_calls"][0]["id"] == found[4]["tool_call_id"] == "call_3_0"


def test_result_without_an_id_belongs_to_an_open_call() -> None:
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("now", "then", "now")]
    results = [{"role": "tool", "content": "x", "name": name} for name in ("then", "now", "now", "now")]
    _, turn, *found = normal(USER, {"role": "assistant", "tool_calls": calls}, *results)
    assert [call["id"] for call in turn["tool_calls"]] == ["call_1_0", "call_1_1", "call_1_2"]
    assert [message.get("tool_call_id") for message in found] == ["call_1_1", "call_1_0", "call_1_2", None]
    _, _, given, other = normal(
        USER, {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": None}, {"role": "tool", "content": "x"},
    )  # fmt: skip
    assert given == {"role": "tool", "tool_call_id": "call_1", "content": ""}
    assert other["tool_call_id"] == "call_2"


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file"])
def test_part_of_a_result_that_is_no_text_is_a_note(kind: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "x"}}]
    *_, given = normal(
        USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": parts}
    )
    note = f"[{kind}: not shown, because this model reads text only]"
    assert given["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": note}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages.0.role"),
        ({"role": "bot", "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "system", "content": None}, "messages.0.content"),
        ({"role": "user", "contents": "x"}, "messages.0.content"),
        ({"role": "user", "content": {"text": "x"}}, "messages.0.content"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages.0.content.0.type"),
        ({"role": "user", "content": [{"type": "text", "txt": "x"}]}, "messages.0.content.0.text"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages.0.content.0.text"),
        ({"role": "user", "content": [{"type": "refusal"}]}, "messages.0.content.0.refusal"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages.0.content.0.type"),
        ({"role": "assistant", "content": "x", "name": 1}, "messages.0.name"),
        ({"role": "assistant", "content": "x", "reasoning": 1}, "messages.0.reasoning"),
        ({"role": "assistant", "audio": {"id": "audio_1"}}, "messages.0.audio"),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "messages.0.function_call.name"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "id": "x", "function": CALL["function"]}]},
         "messages.0.tool_calls.0.type"),
        ({"role": "assistant", "tool_calls": [{"id": "x", "function": {"arguments": "{}"}}]},
         "messages.0.tool_calls.0.function.name"),
        ({"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "now", "arguments": []}}]},
         "messages.0.tool_calls.0.function.arguments"),
    ],
)  # fmt: skip
def test_known_key_with_a_wrong_value_is_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(ChatRequest, {"messages": [message]})
    assert (caught.value.status, caught.value.param) == (400, param)


# --- Options of reasoning ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "effort", "enables", "budget"),
    [
        ({}, None, None, None),
        ({"reasoning_effort": "low"}, "low", True, None),
        ({"reasoning": {"effort": "xhigh", "summary": "auto"}}, "xhigh", True, None),
        ({"reasoning_effort": "low", "reasoning": {"effort": "low"}}, "low", True, None),
        ({"reasoning": {"enabled": True}}, None, True, None),
        ({"reasoning": {"enabled": False}}, "none", False, None),
        ({"reasoning": {"effort": "none"}}, "none", False, None),
        ({"reasoning": {"max_tokens": 9}}, None, True, 9),
        ({"reasoning": {"max_tokens": 0}}, None, None, 0),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, None, True, 9),
        ({"thinking": {"type": "disabled"}}, "none", False, None),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None, None, None),
        ({"thinking_token_budget": 0}, None, None, 0),
        ({"thinking_token_budget": -1}, None, None, None),
        ({"thinking_budget_tokens": 9}, None, None, 9),
        ({"reasoning_budget_tokens": 9, "reasoning": {"max_tokens": 9}}, None, True, 9),
        ({"thinking_budget_tokens": None, "reasoning": None, "thinking": None}, None, None, None),
    ],
)
def test_options_of_reasoning_are_read_from_every_name(
    fields: dict[str, Any], effort: str | None, enables: bool | None, budget: int | None
) -> None:
    body = validate(ChatRequest, {"messages": [USER], **fields})
    assert (body.reasoning_effort, body.enables_reasoning, body.reasoning_budget) == (effort, enables, budget)


@pytest.mark.parametrize(("fields", "expected"), [({}, None), ({"exclude": True}, False), ({"exclude": False}, True)])
def test_excluded_reasoning_is_left_out(fields: dict[str, Any], expected: bool | None) -> None:
    assert validate(ChatRequest, {"messages": [USER], "reasoning": fields}).include_reasoning is expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning_effort": "none", "reasoning": {"enabled": True}}, "reasoning.enabled"),
        ({"reasoning": {"effort": "low", "enabled": False}}, "reasoning.enabled"),
        ({"reasoning": {"enabled": False, "max_tokens": 9}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled"}, "reasoning": {"enabled": True}}, "thinking.type"),
        ({"thinking_token_budget": 8, "reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}, "thinking_token_budget": 8}, "thinking.budget_tokens"),
        ({"include_reasoning": True, "reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"budget_tokens": 9}}, "thinking.type"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort"),
    ],
)
def test_contradiction_in_options_of_reasoning_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(ChatRequest, {"messages": [USER], **fields})
    assert (caught.value.status, caught.value.param) == (400, param)
