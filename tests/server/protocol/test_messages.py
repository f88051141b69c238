"""Requests to `/v1/messages`: refusals, what is accepted without effect, and the chat request that each becomes."""

import json
import re
from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.message_blocks import own_call_id, shown_call_id
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.protocol.validation import validate

HI = {"role": "user", "content": "hi"}
BODY = {"model": "m", "max_tokens": 16, "messages": [HI]}
TOOL = {"name": "now", "description": "The time", "input_schema": {"type": "object"}}
OTHER = {"name": "other", "input_schema": {"type": "object"}, "type": "custom"}
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"zone": "Zürich"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12:00"}


def text(value: str, **keys: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **keys}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def chat(*messages: Any, **fields: Any) -> Any:
    return validate(MessagesRequest, {**BODY, "messages": list(messages) or [HI], **fields}).chat


def turns(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the messages of the chat request without empty fields; parts as a list of their texts."""
    found = [message.model_dump(exclude_none=True) for message in chat(*messages, **fields).messages]
    for message in found:
        if isinstance(message.get("content"), list):
            message["content"] = [part["text"] for part in message["content"]]
    return found


# --- Refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"max_tokens": 0}, "invalid_parameter", "max_tokens", "greater than or equal to 1"),
        ({"max_token": 3}, "unknown_parameter", "max_token", "max_tokens"),
        ({"stop": ["x"]}, "unknown_parameter", "stop", "stop_sequences"),
        ({"messages": []}, "invalid_parameter", "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_parameter", "messages.0.role", '"tool"'),
        ({"messages": [{"content": "x"}]}, "invalid_parameter", "messages.0.role", "null"),
        ({"messages": [{"role": "user"}]}, "invalid_parameter", "messages.0.content", "required"),
        ({"messages": [user({"type": "image", "source": {}})]}, "unsupported_content",
         "messages.0.content.0.type", "reads text only"),
        ({"messages": [user(text("a"), {"type": "document"})]}, "unsupported_content",
         "messages.0.content.1.type", "reads text only"),
        ({"messages": [user({**RESULT, "content": [{"type": "thinking", "thinking": "x"}]})]}, "unsupported_content",
         "messages.0.content.0.content.0.type", "reads text only"),
        ({"messages": [user(CALL)]}, "unsupported_content", "messages.0.content.0.type", "tool_use"),
        ({"messages": [assistant({"type": "server_tool_use"})]}, "unsupported_content",
         "messages.0.content.0.type", "server_tool_use"),
        ({"messages": [HI, assistant({**CALL, "input": "{}"}), HI]}, "invalid_parameter",
         "messages.1.content.0.input", "object"),
        ({"messages": [HI, assistant(CALL)]}, "invalid_parameter", "messages", "results"),
        ({"system": [{"type": "image"}]}, "invalid_parameter", "system.0.type", "text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "unsupported_parameter",
         "tools.0.type", '"web_search" of the type web_search_20250305'),
        ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "unsupported_parameter", "tools.1.type", "bash"),
        ({"tools": [{"name": "now"}]}, "invalid_parameter", "tools.0.input_schema", "required"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "invalid_parameter", "tool_choice.name", "required"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "invalid_parameter", "tool_choice", "object"),
        ({"tool_choice": {"type": "any"}}, "invalid_parameter", "tool_choice", "no tools"),
        ({"thinking": {"type": "on"}}, "invalid_parameter", "thinking.type", "enabled"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "invalid_parameter", "thinking.budget_tokens", "1"),
        ({"thread": {"type": "create"}}, "thread_unsupported_request", "thread", "whole conversation"),
        ({"container": "c"}, "unsupported_parameter", "container", "client"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "unsupported_parameter", "mcp_servers",
         "client"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "unsupported_parameter",
         "context_management.edits.0.type", "summarised"),
        ({"output_config": {"format": {"type": "json_object"}}}, "invalid_parameter", "output_config.format.type",
         "json_schema"),
        ({"temperature": "1"}, "invalid_parameter", "temperature", "number"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_fields_are_named(fields: dict[str, Any], code: str, param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(MessagesRequest, {**BODY, **fields})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)
    assert words in caught.value.message


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_required_fields_are_required(name: str) -> None:
    body = {key: value for key, value in BODY.items() if key != name}
    with pytest.raises(ApiError, match=f"{name} is required"):
        validate(MessagesRequest, body)
    if name == "max_tokens":
        assert validate(CountTokensRequest, body).chat.messages


def test_hints_and_keys_inside_blocks_are_accepted() -> None:
    tool = {
        **TOOL, **EPHEMERAL, "strict": True, "input_examples": [{}], "eager_input_streaming": True,
        "defer_loading": True, "allowed_callers": ["direct"],
    }  # fmt: skip
    found = chat(
        user(text("a", **EPHEMERAL, citations=None), {**RESULT, **EPHEMERAL, "toolset_name": None}),
        assistant(text("b", citations=[], parsed_output=None), {**CALL, **EPHEMERAL, "caller": {"type": "direct"}}),
        {**user(RESULT), "id": "msg_1"},
        system=[text("s", **EPHEMERAL)],
        tools=[tool, OTHER],
        metadata={"user_id": "u"},
        service_tier="standard_only",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        mcp_servers=[],
        container=None,
        speed="standard",
        inference_geo=None,
        diagnostics={"previous_message_id": None},
        **EPHEMERAL,
    )
    offer = found.offer()
    assert [tool["function"]["name"] for tool in offer.tools] == ["now", "other"]
    assert offer.tools[0]["function"] == {
        "name": "now", "description": "The time", "parameters": {"type": "object"},
    }  # fmt: skip


# --- The conversation ---------------------------------------------------------------------------


def test_blocks_of_system_text_keep_their_order_and_text() -> None:
    first, *_ = turns(HI, system=[text("You are brief.\n"), text(""), text("Today is Monday.")])
    assert first == {"role": "system", "content": "You are brief.\n\n\nToday is Monday."}
    assert turns(HI, system="plain")[0] == {"role": "system", "content": "plain"}
    assert turns(HI, system="") == turns(HI, system=[]) == [HI]


def test_system_text_does_not_change_with_an_agents_billing_line() -> None:
    def system(number: int) -> list[Any]:
        header = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={number:05x};"
        return turns(HI, system=[text(header), text("You are an agent.")])

    assert system(1) == system(2) == turns(HI, system="You are an agent.")
    joined = "x-anthropic-billing-header: cch=1;\nYou are an agent."
    assert turns(HI, system=joined) == system(1)
    kept = "Do not send x-anthropic-billing-header: it is for others."
    assert turns(HI, system=kept)[0]["content"] == kept


def test_results_become_messages_before_the_text_behind_them_in_their_order() -> None:
    second = {**CALL, "id": "toolu_2", "input": {}}
    found = turns(
        HI,
        assistant(text("Let me see."), CALL, second),
        user({**RESULT, "tool_use_id": "toolu_2", "content": [text("a"), text("b")]}, RESULT, text("And?"), text("!")),
    )
    _, turn, one, two, last = found
    assert [call["id"] for call in turn["tool_calls"]] == ["1", "2"]
    assert [json.loads(call["function"]["arguments"]) for call in turn["tool_calls"]] == [{"zone": "Zürich"}, {}]
    assert turn["content"] == "Let me see."
    assert one == {"role": "tool", "content": ["a", "b"], "tool_call_id": "2"}
    assert two == {"role": "tool", "content": "12:00", "tool_call_id": "1"}
    assert last == {"role": "user", "content": ["And?", "!"]}


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({}, ""),
        ({"content": []}, ""),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"content": "Error: no such file", "is_error": True}, "Error: no such file"),
        ({"content": [text("no"), text("file")], "is_error": True}, ["Error: no", "file"]),
        ({"is_error": True}, "Error"),
        ({"content": "fine", "is_error": False}, "fine"),
    ],
)
def test_failed_result_says_so(result: dict[str, Any], content: Any) -> None:
    *_, last = turns(HI, assistant(CALL), user({"type": "tool_result", "tool_use_id": "toolu_1", **result}))
    assert last == {"role": "tool", "content": content, "tool_call_id": "1"}


def test_earlier_reasoning_is_the_reasoning_of_its_message() -> None:
    blocks = (
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "So."},
        text("Yes"),
        text("."),
    )
    _, turn, _ = turns(HI, assistant(*blocks), HI)
    assert turn == {"role": "assistant", "content": "Yes.", "reasoning": "Hm.\nSo."}


def test_turns_of_one_role_may_follow_each_other_and_later_instructions_stay_in_their_place() -> None:
    later = {"role": "system", "content": [text("Be brief.")]}
    found = turns(HI, HI, later, assistant(text("a")), assistant(text("b")), user())
    assert [(turn["role"], turn["content"]) for turn in found] == [
        ("user", "hi"), ("user", "hi"), ("system", "Be brief."), ("assistant", "a"), ("assistant", "b"), ("user", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("last", "content"),
    [("The answer is ", "The answer is "), ([text("The answer"), text(" is")], "The answer is")],
)
def test_last_message_of_the_assistant_is_the_beginning_of_the_answer(last: Any, content: str) -> None:
    found = chat(HI, {"role": "assistant", "content": last})
    assert found.continue_final_message
    assert found.messages[-1].content == content


@pytest.mark.parametrize("last", ["", [], [text("")]])
def test_empty_beginning_of_the_answer_is_none(last: Any) -> None:
    found = chat(HI, {"role": "assistant", "content": last})
    assert not found.continue_final_message
    assert len(found.messages) == 1


# --- Options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "demand", "is_parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}, True),
        ({"type": "none"}, None, True),
    ],
)
def test_tool_choice_is_that_of_chat(choice: Any, demand: Any, is_parallel: bool) -> None:
    found = chat(HI, tools=[TOOL, OTHER], tool_choice=choice)
    offer = found.offer()
    assert (None if offer is None else offer.choice) == demand
    assert found.parallel_tool_calls == is_parallel


def test_names_of_tools_and_their_number_may_exceed_those_of_chat() -> None:
    name = "mcp__" + "long_" * 20 + "name"
    tools = [{**TOOL, "name": f"{name}_{index}"} for index in range(300)]
    call = {**CALL, "name": f"{name}_1"}
    found = chat(HI, assistant(call), user(RESULT), tools=tools, tool_choice={"type": "tool", "name": f"{name}_1"})
    assert len(found.offer().tools) == 300
    assert found.messages[1].tool_calls[0].function.name == f"{name}_1"


@pytest.mark.parametrize(
    ("thinking", "budget", "effort"),
    [
        (None, None, None),
        ({"type": "enabled", "budget_tokens": 2048}, 2048, None),
        ({"type": "disabled"}, None, "none"),
        ({"type": "adaptive", "display": "summarized"}, None, None),
        ({"type": "between_tools"}, None, None),
    ],
)
def test_thinking_sets_the_budget_of_reasoning(thinking: Any, budget: int | None, effort: str | None) -> None:
    found = chat(HI, thinking=thinking)
    assert (found.reasoning_budget, found.reasoning_effort) == (budget, effort)
    assert found.include_reasoning is not False


def test_omitted_thinking_is_left_out_and_effort_gives_way_to_disabled_thinking() -> None:
    assert chat(HI, thinking={"type": "adaptive", "display": "omitted"}).include_reasoning is False
    assert chat(HI, output_config={"effort": "low"}).reasoning_effort == "low"
    off = chat(HI, output_config={"effort": "low"}, thinking={"type": "disabled"})
    assert off.reasoning_effort == "none"


def test_sampling_fields_keep_their_values_and_unset_ones_stay_unset() -> None:
    found = chat(HI, temperature=1, top_k=3, top_p=None, stop_sequences=["x", "y"], seed=4)
    assert found.sampling_values() == {"temperature": 1, "top_k": 3, "stop": ["x", "y"], "seed": 4}
    assert found.max_tokens == 16


def test_format_of_the_output_is_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = chat(HI, output_config={"format": {"type": "json_schema", "schema": schema}})
    enforced = json.loads(found.sampling_values()["structured_outputs"].json)
    assert enforced["properties"] == schema["properties"]


@pytest.mark.parametrize("own", ["call_0a1b", "a1B2c3D4e", "functions.now:0", "chatcmpl-tool-2f"])
def test_id_of_a_call_fits_anthropics_pattern_and_comes_back_as_it_was(own: str) -> None:
    shown = shown_call_id(own)
    assert re.fullmatch(r"toolu_[a-zA-Z0-9_-]+", shown)
    assert own_call_id(shown) == own


def test_id_with_other_characters_still_fits_the_pattern() -> None:
    assert re.fullmatch(r"[a-zA-Z0-9_-]+", shown_call_id("a b<|é|>"))
