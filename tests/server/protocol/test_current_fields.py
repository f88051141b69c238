"""Every field of the installed OpenAI client is implemented, ignored or refused with a reason, never unknown.

A new version of the client with new fields fails here with their names.
"""

from typing import Any

import pytest
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase, CompletionCreateParamsStreaming
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import (
    FunctionToolParam,
    NamespaceToolParam,
    ResponseTextConfigParam,
    response_create_params,
)
from openai.types.shared_params import FunctionDefinition, Reasoning, ResponseFormatJSONSchema

from quire.server.errors import ApiError
from quire.server.protocol import chat, fields, prompts, response_tools, responses, tools
from quire.server.protocol.validation import validate
from tests.server.fake_engine import CHAT

REQUESTS = [
    (chat.ChatRequest, chat_params.CompletionCreateParamsBase),
    (chat.ChatRequest, chat_params.CompletionCreateParamsStreaming),
    (responses.ResponsesRequest, response_create_params.ResponseCreateParamsBase),
    (responses.ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
    (prompts.CompletionRequest, CompletionCreateParamsBase),
    (prompts.CompletionRequest, CompletionCreateParamsStreaming),
    (prompts.EmbeddingRequest, EmbeddingCreateParams),
]
OBJECTS = [
    (fields.StreamOptions, ChatCompletionStreamOptionsParam),
    (fields.StreamOptions, response_create_params.StreamOptions),
    (fields.ResponseFormat, ResponseFormatJSONSchema),
    (responses.TextOptions, ResponseTextConfigParam),
    (chat.ReasoningOptions, Reasoning),
    (tools.Tool, ChatCompletionFunctionToolParam),
    (tools.FunctionDefinition, FunctionDefinition),
    (response_tools.FunctionTool, FunctionToolParam),
    (response_tools.NamespaceTool, NamespaceToolParam),
]


def names(kind: Any) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


def test_every_field_of_openais_requests_is_known() -> None:
    for kind, params in REQUESTS:
        unknown = params.__annotations__.keys() - names(kind) - fields.UNSUPPORTED.keys()
        assert not unknown, f"{params.__module__}: sort these into {kind.__name__} or UNSUPPORTED"


def test_every_field_of_openais_objects_is_known() -> None:
    for kind, params in OBJECTS:
        assert params.__annotations__.keys() <= names(kind), f"{kind.__name__} lacks fields of {params.__name__}"


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (chat.ChatRequest, "moderation", {"model": "omni-moderation-latest"}),
        (chat.ChatRequest, "web_search_options", {}),
        (chat.ChatRequest, "audio", {"voice": "alloy", "format": "wav"}),
        (chat.ChatRequest, "functions", [{"name": "now"}]),
        (responses.ResponsesRequest, "moderation", {"model": "omni-moderation-latest"}),
        (responses.ResponsesRequest, "context_management", [{"type": "compaction", "compact_threshold": 1000}]),
    ],
)
def test_field_that_would_change_the_answer_is_refused_with_a_reason(kind: Any, name: str, value: Any) -> None:
    body = CHAT if kind is chat.ChatRequest else {"input": "hi"}
    with pytest.raises(ApiError) as caught:
        validate(kind, {**body, name: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)
    assert caught.value.message == f"{name} is not supported: {fields.UNSUPPORTED[name]}"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}, "prompt_cache_key": "k"},
        {"reasoning": {"effort": "medium", "summary": "concise", "context": "all_turns", "mode": "standard"}},
        {"client_metadata": {"session": "a"}},
        {"max_tool_calls": 3, "text": {"verbosity": "low"}},
    ],
)
def test_hint_of_a_response_is_taken(fields: dict[str, Any]) -> None:
    assert validate(responses.ResponsesRequest, {"input": "hi", **fields})
