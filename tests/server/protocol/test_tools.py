from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.validation import validate
from tests.server.fake_engine import CHAT, MESSAGES

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "now"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("any", "now")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto", "now")}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"json_object": True}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": NAMED, "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls.0.function"),
    ],
)
def test_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(ChatRequest, {**CHAT, **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("choice", ["none", "auto", "required", NAMED, None])
def test_tool_choice_is_accepted(choice: Any) -> None:
    assert validate(ChatRequest, {**CHAT, "tools": [TOOL], "tool_choice": choice})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones_offered(mode: str) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    offer = validate(ChatRequest, {**CHAT, "tools": [TOOL, other], "tool_choice": allowed(mode, "other")}).offer()
    assert offer is not None
    assert (offer.tools, offer.choice, offer.demands) == ([other], mode, mode == "required")


def test_empty_list_of_tools_is_none() -> None:
    assert validate(ChatRequest, {**CHAT, "tools": []}).offer() is None


def test_call_and_its_result_are_messages() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    assert validate(ChatRequest, {**CHAT, "messages": turns})
