"""Requests to `/v1/responses`: refusals, and the chat request that each becomes."""

from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.response_tools import namespaces
from quire.server.protocol.responses import WITH_LOGPROBS, ResponsesRequest
from quire.server.protocol.validation import validate

BODY = {"model": "m", "input": "a"}
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "other"}
NAMED = {"type": "function", "name": "now"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "now", "arguments": "{}",
        "status": "completed"}  # fmt: skip
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "12:00"}
TURN = {"role": "user", "content": "a"}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"store": True}, "invalid_parameter", "store"),
        ({"store": 0}, "invalid_parameter", "store"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"truncation": "auto"}, "invalid_parameter", "truncation"),
        ({"include": ["file_search_call.results"]}, "invalid_parameter", "include.0"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_parameter", "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "invalid_parameter", "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "invalid_parameter", "text.format.schema"),
        ({"response_format": {"type": "text"}}, "unsupported_parameter", "response_format"),
        ({"stream_options": {}}, "invalid_parameter", "stream_options"),
        ({"chat_template_kwargs": {"tools": []}}, "invalid_parameter", "chat_template_kwargs"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "invalid_parameter", "input.0.type"),
        ({"input": [{"id": "msg_1"}]}, "invalid_parameter", "input.0.type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "invalid_parameter", "input.0.type"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "invalid_parameter", "input.0.summary"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "invalid_parameter", "input"),
        ({"input": [{"role": "user", "content": [{"type": "reasoning", "text": "x"}]}]}, "invalid_parameter",
         "input.0.content"),
        ({"input": [TURN, {**RESULT, "output": [{"type": "reasoning", "text": "x"}]}]}, "invalid_parameter",
         "input.1.output"),
        ({"reasoning": {"effort": "huge"}}, "invalid_parameter", "reasoning.effort"),
        ({"reasoning": {"effort": "none", "max_tokens": 5}}, "invalid_parameter", "reasoning.max_tokens"),
        ({"thinking_token_budget": 5}, "unsupported_parameter", "thinking_token_budget"),
        ({"input": [TURN, {"type": "function_call", "call_id": "1", "name": "now"}]}, "invalid_parameter",
         "input.1.arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "unsupported_content", "input.0.content.0.type"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools.0.type"),
        ({"tools": [TOOL, {"type": "code_interpreter", "container": {}}]}, "unsupported_parameter", "tools.1.type"),
        ({"tools": [{"type": "custom", "name": "now"}]}, "unsupported_parameter", "tools.0.type"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "unsupported_parameter", "tools.0.type"),
        ({"tools": [{"type": 5}]}, "invalid_parameter", "tools.0.type"),
        ({"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]}, "unsupported_parameter",
         "tools.0.allowed_callers"),
        ({"tools": [{"type": "function"}]}, "invalid_parameter", "tools.0.name"),
        ({"tools": [{"type": "function", "function": {"name": "now"}}]}, "invalid_parameter", "tools.0.name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "invalid_parameter", "tools.0.name"),
        ({"tools": [TOOL] * 129}, "invalid_parameter", "tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "invalid_parameter", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "invalid_parameter", "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "unsupported_parameter",
         "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "other")}, "invalid_parameter", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("auto")}, "invalid_parameter", "tool_choice.tools"),
        ({"tool_choice": "required"}, "invalid_parameter", "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "invalid_parameter", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"json_object": True}},
         "invalid_parameter", "tool_choice"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_fields_are_named(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(ResponsesRequest, {**BODY, **fields})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)


@pytest.mark.parametrize(
    ("fields", "num_top"), [({}, None), ({"top_logprobs": 2}, 2), ({"include": [WITH_LOGPROBS]}, 0)], ids=str
)
def test_log_probabilities_are_asked_for_in_either_way(fields: dict[str, Any], num_top: int | None) -> None:
    chat = validate(ResponsesRequest, {**BODY, **fields}).chat
    assert ((chat.top_logprobs or 0) if chat.logprobs else None) == num_top


def test_sampling_fields_keep_their_values_and_unset_ones_stay_unset() -> None:
    fields = {"temperature": 0.5, "top_p": None, "stop": "x", "seed": 3}
    chat = validate(ResponsesRequest, {**BODY, "max_output_tokens": 7, **fields}).chat
    assert chat.sampling_values() == {"temperature": 0.5, "stop": ["x"], "seed": 3}
    assert chat.max_tokens == 7


@pytest.mark.parametrize(
    ("choice", "names", "demand"),
    [
        (None, ["now", "other"], "auto"),
        ("auto", ["now", "other"], "auto"),
        ("required", ["now", "other"], "required"),
        (NAMED, ["now", "other"], {"type": "function", "function": {"name": "now"}}),
        (allowed("auto", "other"), ["other"], "auto"),
        (allowed("required", "other", "other"), ["other"], "required"),
    ],
)
def test_tools_and_choice_are_those_of_chat(choice: Any, names: list[str], demand: Any) -> None:
    body = validate(ResponsesRequest, {**BODY, "tools": [TOOL, OTHER], "tool_choice": choice})
    offer = body.chat.offer()
    assert offer is not None
    assert [tool["function"]["name"] for tool in offer.tools] == names
    assert offer.choice == demand


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}, {"tool_choice": "auto"}]
)
def test_no_tools_are_offered(fields: dict[str, Any]) -> None:
    assert validate(ResponsesRequest, {**BODY, **fields}).chat.offer() is None


def test_call_becomes_part_of_the_assistants_turn_before_it() -> None:
    second = {**CALL, "call_id": "call_2", "arguments": '{"zone": "UTC"}'}
    parts = [{"type": "input_text", "text": "13:00"}]
    items = [
        TURN,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        CALL, second, RESULT, {**RESULT, "call_id": "call_2", "output": parts}, CALL,
    ]  # fmt: skip
    chat = validate(ResponsesRequest, {**BODY, "input": items}).chat
    user, turn, one, two, again = [message.model_dump(exclude_none=True) for message in chat.messages]
    assert [message["role"] for message in (user, turn, one, two, again)] == [
        "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert [call["id"] for call in turn["tool_calls"]] == ["call_1", "call_2"]
    assert turn["content"] == [{"type": "text", "text": "Let me see."}]
    assert (two["tool_call_id"], two["content"]) == ("call_2", [{"type": "text", "text": "13:00"}])
    assert again["content"] == ""


def test_items_of_one_answer_are_one_message_with_its_reasoning() -> None:
    parts = [{"type": "reasoning_text", "text": "Which city?"}]
    items = [
        TURN,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts, "encrypted_content": None,
         "status": "completed"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "commentary",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "parsed": None}]},
        {**CALL, "parsed_arguments": {}, "caller": {"type": "direct"}, "namespace": "x"},
        {"type": "message", "role": "assistant", "content": "Wait."},
        {**RESULT, "id": "fco_1", "status": "completed", "name": "now"},
        {"type": "reasoning", "id": "rs_2", "content": None, "summary": [{"type": "summary_text", "text": "Noon."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "gAAAA"},
        TURN,
    ]  # fmt: skip
    chat = validate(ResponsesRequest, {**BODY, "input": items}).chat
    call = {"id": "call_1", "type": "function", "function": {"name": "x__now", "arguments": "{}"}}
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning": "Which city?", "tool_calls": [call],
         "content": [{"type": "text", "text": "Let me see."}, {"type": "text", "text": "Wait."}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
        {"role": "assistant", "reasoning": "Noon.", "content": [{"type": "text", "text": "No."}]},
        {"role": "user", "content": "a"},
    ]  # fmt: skip


def test_item_reference_error_says_what_to_send() -> None:
    with pytest.raises(ApiError, match="send the item itself"):
        validate(ResponsesRequest, {**BODY, "input": [{"type": "item_reference", "id": "x"}]})


def test_options_of_reasoning_are_those_of_chat() -> None:
    options = {"effort": "low", "summary": "auto", "max_tokens": 7, "exclude": True}
    chat = validate(ResponsesRequest, {**BODY, "reasoning": options}).chat
    assert (chat.reasoning_effort, chat.reasoning_budget, chat.include_reasoning) == ("low", 7, False)
    chat = validate(ResponsesRequest, {**BODY, "reasoning": {"enabled": False}}).chat
    assert (chat.reasoning_effort, chat.enables_reasoning) == ("none", False)


def test_hints_of_tools_are_taken_and_reach_no_prompt() -> None:
    hints = {"allowed_callers": ["direct", "programmatic"], "defer_loading": True, "output_schema": {"type": "string"}}
    offer = validate(ResponsesRequest, {**BODY, "tools": [{**TOOL, **hints}]}).chat.offer()
    assert offer is not None
    assert offer.tools == [{"type": "function", "function": {name: TOOL[name] for name in TOOL if name != "type"}}]


def test_functions_of_a_namespace_have_its_name_and_description() -> None:
    space = {"type": "namespace", "name": "crm", "description": "Customers.",
             "tools": [{**TOOL, "description": "The time"}, {**TOOL, "name": "who"}]}  # fmt: skip
    request = validate(ResponsesRequest, {**BODY, "tools": [TOOL, space]})
    offer = request.chat.offer()
    assert offer is not None
    functions = [tool["function"] for tool in offer.tools]
    assert [function["name"] for function in functions] == ["now", "crm__now", "crm__who"]
    assert [function.get("description") for function in functions] == [None, "Customers.\n\nThe time", None]
    assert namespaces(request.tools) == {"crm__now": ("crm", "now"), "crm__who": ("crm", "who")}


@pytest.mark.parametrize("kind", ["custom", "mcp"])
def test_other_tool_in_a_namespace_is_refused(kind: str) -> None:
    space = {"type": "namespace", "name": "crm", "description": "", "tools": [TOOL, {"type": kind, "name": "x"}]}
    with pytest.raises(ApiError) as caught:
        validate(ResponsesRequest, {**BODY, "tools": [space]})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools.0.tools.1.type")
