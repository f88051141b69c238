"""Errors about request bodies: the field's path, its limit, and its value."""

import json
from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.fields import UNSUPPORTED, WITHOUT_EFFECT
from quire.server.protocol.prompts import CompletionRequest, EmbeddingRequest
from quire.server.protocol.responses import ResponsesRequest
from quire.server.protocol.validation import parse_body, validate
from tests.server.fake_engine import CHAT, MESSAGES


def refusal(value: Any, kind: Any = ChatRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(kind, json.dumps(value).encode())
    assert caught.value.status == 400
    assert len(caught.value.message) < 600
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": 3}, "temperature", "temperature must be less than or equal to 2, got 3"),
        ({"temperature": "1"}, "temperature", 'temperature must be a valid number, got "1"'),
        ({"top_p": -1}, "top_p", "top_p must be greater than or equal to 0, got -1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be greater than 0, got 0"),
        ({"n": 1.5}, "n", "n must be a valid integer, got 1.5"),
        ({"n": True}, "n", "n must be a valid integer, got true"),
        ({"stop": ["a", 3]}, "stop.1", "stop.1 must be text, got 3"),
        ({"stop": 3}, "stop", "stop must be text, got 3"),
        ({"stop": ["a"] * 17}, "stop", "stop must have at most 16 items, got a list of 17 items"),
        ({"stop": ""}, "stop", 'stop must have at least 1 character, got ""'),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5 must be less than or equal to 100, got 101"),
        ({"stream": "yes"}, "stream", 'stream must be a valid boolean, got "yes"'),
        ({"stream_options": 1, "stream": True}, "stream_options", "stream_options must be a valid object, got 1"),
        ({"messages": []}, "messages", "messages must have at least 1 item, got a list of 0 items"),
        ({"messages": {}}, "messages", "messages must be a valid list, got an object"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "messages.0.role is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "messages.0.content must be text, got 5"),  # noqa: E501
        ({"messages": [{"role": "assistant", "audio": {}}]}, "messages.0.audio", "messages.0.audio must be null, got an object"),  # noqa: E501
        ({"modalities": ["text", "audio"]}, "modalities.1", 'modalities.1 must be \'text\', got "audio"'),
        ({"stream_options": {}}, "stream_options", "stream_options needs stream: true"),
    ],
)  # fmt: skip
def test_error_names_the_field_and_its_limit(fields: dict[str, Any], param: str, message: str) -> None:
    error = refusal({**CHAT, **fields})
    assert (error.param, error.message, error.code) == (param, message, "invalid_parameter")


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file", "video_url"])
def test_content_other_than_text_is_refused(part: str) -> None:
    content = [{"type": "text", "text": "see"}, {"type": part, part: {"url": "http://example.com/a.png"}}]
    error = refusal({**CHAT, "messages": [{"role": "user", "content": content}]})
    assert (error.code, error.param) == ("unsupported_content", "messages.0.content.1.type")
    assert f'messages.0.content.1 is of type "{part}": this server reads text only' in error.message


def test_unknown_field_error_names_the_nearest_known_one() -> None:
    error = refusal({**CHAT, "max_token": 5})
    assert (error.code, error.param) == ("unknown_parameter", "max_token")
    assert error.message == "unknown field \"max_token\" (did you mean 'max_tokens'?)"


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("n_predict", ChatRequest, ": use max_tokens"),
        ("repeat_penalty", ChatRequest, ": use repetition_penalty"),
        ("enable_thinking", ChatRequest, ": use chat_template_kwargs.enable_thinking"),
        ("best_of", ChatRequest, ": use n"),
        ("best_off", CompletionRequest, " (did you mean 'best_of'?)"),
        ("n_predict", EmbeddingRequest, ""),
        ("n_predict", ResponsesRequest, ": use max_output_tokens"),
        ("max_tokens", ResponsesRequest, ": use max_output_tokens"),
        ("messages", ResponsesRequest, ": use input"),
        ("messages", CompletionRequest, ": use prompt"),
        ("input", ChatRequest, ": use messages"),
        ("max_completion_tokens", CompletionRequest, ": use max_tokens"),
        ("penalize_nl", ChatRequest, ""),
        ("reasoning_budget", ChatRequest, ": use thinking_token_budget"),
        ("thinking_budget", ResponsesRequest, ": use reasoning.max_tokens"),
    ],
)
def test_hint_is_a_field_of_this_request(name: str, kind: Any, hint: str) -> None:
    """Never the name itself, nor a field that only another route has."""
    needed = {"model": "m", **({"messages": MESSAGES} if kind is ChatRequest else {"prompt": "x", "input": "x"})}
    body = {key: value for key, value in needed.items() if key in kind.model_fields}
    assert refusal({**body, name: 1}, kind).message == f"unknown field {json.dumps(name)}{hint}"


def test_hint_inside_an_object_is_a_field_of_that_object() -> None:
    function = {"name": "now", "parametres": {}}
    error = refusal({**CHAT, "tools": [{"type": "function", "function": function}]})
    assert error.message == "unknown field \"parametres\" (did you mean 'parameters'?)"
    assert refusal({**CHAT, "reasoning": {"temperature": 1}}).message == 'unknown field "temperature"'
    fields = {"response_format": {"type": "text", "json_shema": {}}}
    assert refusal({**CHAT, **fields}).message == "unknown field \"json_shema\" (did you mean 'json_schema'?)"


@pytest.mark.parametrize("name", sorted(set(UNSUPPORTED) - set(ChatRequest.model_fields)))
def test_unsupported_field_is_refused_unless_null(name: str) -> None:
    error = refusal({**CHAT, name: {"any": "value"}})
    assert (error.code, error.param) == ("unsupported_parameter", name)
    assert error.message.startswith(f"{name} is not supported: ")
    validate(ChatRequest, {**CHAT, name: None})


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_neutral_value_of_unsupported_field_is_accepted(name: str) -> None:
    validate(ChatRequest, {**CHAT, name: WITHOUT_EFFECT[name]})
    for other in (True, 2, "x", [], [1]):
        if type(other) is type(WITHOUT_EFFECT[name]) and other == WITHOUT_EFFECT[name]:
            continue
        assert refusal({**CHAT, name: other}).code == "unsupported_parameter"


def test_field_of_another_request_may_be_null() -> None:
    for name in ("input", "max_output_tokens", "embed_dtype"):
        validate(ChatRequest, {**CHAT, name: None})
    assert refusal({**CHAT, "no_such_field": None}).code == "unknown_parameter"
    assert refusal({**CHAT, "messages": None}).message == "messages must be a valid list, got null"


def test_default_of_vllm_is_accepted_and_its_opposite_refused() -> None:
    name = "spaces_between_special_tokens"
    for value in (True, None):
        validate(ChatRequest, {**CHAT, name: value})
    for value in (False, 1, 0, "no"):
        error = refusal({**CHAT, name: value})
        assert (error.status, error.code, error.param) == (400, "invalid_parameter", name)
    assert refusal({**CHAT, "store": 0}).message == "store must be a valid boolean, got 0"


def test_long_values_and_names_are_cut() -> None:
    assert len(refusal({**CHAT, "x" * 5000: 1}).message) < 300
    assert len(refusal({**CHAT, "service_tier": "y" * 5000}).message) < 300
    assert len(refusal({**CHAT, "logit_bias": {"z" * 5000: 1}}).param or "") <= 200


def test_only_the_first_of_many_bad_items_is_reported() -> None:
    error = refusal({"model": "m", "prompt": [1] * 1000 + ["x"] * 100_000}, CompletionRequest)
    assert error.param == "prompt.1000"
