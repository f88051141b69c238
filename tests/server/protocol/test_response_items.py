from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.response_items import chat_messages
from quire.server.protocol.responses import ResponsesRequest
from quire.server.protocol.validation import validate

BODY = {"model": "m", "input": "a"}
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "other"}
NAMED = {"type": "function", "name": "now"}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "now",
    "arguments": "{}",
    "status": "completed",
}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "12:00"}
TURN = {"role": "user", "content": "a"}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL, {"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools.1.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "function": {"name": "now"}}]}, "tools.0.name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice.tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"json_object": True}}, "tool_choice"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0.type"),
        ({"input": [TURN, {"type": "function_call", "call_id": "1", "name": "now"}]}, "input.1.arguments"),
        ({"input": [TURN, RESULT]}, "input.1.call_id"),
        ({"input": [TURN, RESULT, CALL]}, "input.1.call_id"),
    ],
)
def test_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(ResponsesRequest, {**BODY, **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_hosted_tool_is_told_what_there_is() -> None:
    with pytest.raises(ApiError, match=r"web_search is no tool of this server.*type function"):
        validate(ResponsesRequest, {**BODY, "tools": [{"type": "web_search", "search_context_size": "low"}]})


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
def test_what_is_offered(choice: Any, names: list[str], demand: Any) -> None:
    offer = validate(ResponsesRequest, {**BODY, "tools": [TOOL, OTHER], "tool_choice": choice}).offer()
    assert offer is not None
    assert [tool["function"]["name"] for tool in offer.tools] == names
    assert offer.choice == demand


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}, {"tool_choice": "auto"}]
)
def test_nothing_is_offered(fields: dict[str, Any]) -> None:
    assert validate(ResponsesRequest, {**BODY, **fields}).offer() is None


def test_a_call_can_be_sent_back_with_all_fields_of_openais_client() -> None:
    call = {**CALL, "caller": None, "namespace": None}
    assert validate(ResponsesRequest, {**BODY, "input": [TURN, call, RESULT]})


def test_calls_belong_to_the_turn_before_them() -> None:
    second = {**CALL, "call_id": "call_2", "arguments": '{"zone": "UTC"}'}
    parts = [{"type": "input_text", "text": "13:00"}]
    items = [
        TURN,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        CALL, second, RESULT, {**RESULT, "call_id": "call_2", "output": parts}, CALL,
    ]  # fmt: skip
    found = validate(ResponsesRequest, {**BODY, "input": items}).input
    assert not isinstance(found, str)
    user, turn, one, two, again = chat_messages(found)
    assert (user["role"], turn["role"], one["role"], two["role"], again["role"]) == (
        "user", "assistant", "tool", "tool", "assistant",
    )  # fmt: skip
    assert [call["id"] for call in turn["tool_calls"]] == ["call_1", "call_2"]
    assert turn["content"] == [{"type": "text", "text": "Let me see."}]
    assert (two["tool_call_id"], two["content"]) == ("call_2", [{"type": "text", "text": "13:00"}])
    assert again["content"] == ""
