"""Requests of chat, prompts and embeddings: refused fields, limits, neutral values, and tools."""

from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.chat import RESERVED_VARIABLES, ChatRequest
from quire.server.protocol.prompts import MAX_CHOICES, CompletionRequest, EmbeddingRequest, TokenizeRequest
from quire.server.protocol.validation import validate
from tests.server.fake_engine import CHAT, MESSAGES

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "now"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionRequest, {"prompt": ["a"] * 17, "n": 128}, "n"),
        (CompletionRequest, {"prompt": ["a"] * (MAX_CHOICES + 1)}, "prompt"),
        (CompletionRequest, {"prompt": "a", "n": 1, "best_of": 2}, "best_of"),
        (CompletionRequest, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (CompletionRequest, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CompletionRequest, {"prompt": [1], "suffix": "x"}, "suffix"),
        (CompletionRequest, {"prompt": "", "suffix": ""}, "prompt"),
        (EmbeddingRequest, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (EmbeddingRequest, {"input": "a", "endianness": "big"}, "endianness"),
        (TokenizeRequest, {}, "prompt"),
        (TokenizeRequest, {"prompt": "a", "messages": MESSAGES}, "prompt"),
        (TokenizeRequest, {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (TokenizeRequest, {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        (ChatRequest, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        (ChatRequest, {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (ChatRequest, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (ChatRequest, {"tools": [{"type": "function"}]}, "tools.0.function"),
        (ChatRequest, {"tools": [TOOL] * 129}, "tools"),
        (ChatRequest, {"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (ChatRequest, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (ChatRequest, {"tool_choice": "required"}, "tool_choice"),
        (ChatRequest, {"tools": [TOOL], "tool_choice": allowed("auto", "other")}, "tool_choice"),
        (ChatRequest, {"tools": [TOOL], "tool_choice": allowed("any", "now")}, "tool_choice.allowed_tools.mode"),
        (ChatRequest, {"tool_choice": allowed("auto", "now")}, "tool_choice"),
        (ChatRequest, {"tool_choice": NAMED}, "tool_choice"),
        (ChatRequest, {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"json_object": True}},
         "tool_choice"),
        (ChatRequest, {"tools": [TOOL], "tool_choice": NAMED, "structured_outputs": {"regex": "a"}}, "tool_choice"),
        (ChatRequest, {"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]}, "tools.0.allowed_callers"),
        (ChatRequest, {"tools": [{**TOOL, "unknown": 1}]}, "tools.0.unknown"),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
         "messages.0.tool_calls.0.function"),
        (ChatRequest, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (ChatRequest, {"continue_final_message": True, "answer_token_ids": [[1]]}, "answer_token_ids"),
        (ChatRequest, {"answer_token_ids": [[-1]]}, "answer_token_ids.0.0"),
        (ChatRequest, {"top_logprobs": 2}, "top_logprobs"),
        (ChatRequest, {"stream_options": {"include_usage": True}}, "stream_options"),
        (ChatRequest, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        *((ChatRequest, {"chat_template_kwargs": {name: 1}}, "chat_template_kwargs")
          for name in sorted(RESERVED_VARIABLES)),
    ],
)  # fmt: skip
def test_refused_field_is_named(kind: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(kind, {**(CHAT if kind is ChatRequest else {}), **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"prompt": ["a"] * MAX_CHOICES}),
        (CompletionRequest, {"prompt": ["a"] * 16, "n": 128}),
        (CompletionRequest, {"prompt": "a", "n": 3, "best_of": 3}),
        (CompletionRequest, {"prompt": "a", "n": 3, "best_of": 1}),
        (CompletionRequest, {"prompt": "a", "max_tokens": 0, "echo": True}),
        (CompletionRequest, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}),
        (EmbeddingRequest, {"input": "a", "embed_dtype": "float32", "endianness": "native", "padding": None,
                            "cache_salt": None, "request_id": "a"}),
        (TokenizeRequest, {"prompt": ""}),
    ],
)  # fmt: skip
def test_limits_and_neutral_values_are_accepted(kind: Any, fields: dict[str, Any]) -> None:
    assert isinstance(validate(kind, fields), kind)


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u"}, {"metadata": {"a": 1}}, {"store": True}, {"service_tier": "auto"}, {"safety_identifier": "s"},
        {"prompt_cache_key": "k"}, {"prompt_cache_retention": "24h"}, {"parallel_tool_calls": True},
        {"reasoning_effort": "low"}, {"modalities": ["text"]}, {"verbosity": "low"}, {"include_reasoning": True},
        {"session_id": "s"}, {"stream_interval": 5}, {"top_logprobs": 0},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"prediction": {"type": "content", "content": "x"}}, {"n": None}, {"stream": None}, {"logprobs": None},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_fields_without_effect_are_taken(field: dict[str, object]) -> None:
    assert validate(ChatRequest, {**CHAT, **field})


def test_hints_of_tools_reach_no_prompt() -> None:
    hints = {
        "cache_control": {"type": "ephemeral"},
        "defer_loading": False,
        "output_schema": {},
        "allowed_callers": None,
    }
    function = {**TOOL["function"], "return": {"type": "string"}, **hints}
    offer = validate(ChatRequest, {**CHAT, "tools": [{**TOOL, "function": function, **hints}]}).offer()
    assert offer is not None
    assert offer.tools == [TOOL]
