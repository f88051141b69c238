"""Requests of the routes that take prompts: refused fields, limits and neutral values."""

from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.prompts import MAX_CHOICES, CompletionRequest, EmbeddingRequest, TokenizeRequest
from quire.server.protocol.validation import validate
from tests.server.fake_engine import MESSAGES


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionRequest, {"prompt": ["a"] * 17, "n": 128}, "n"),
        (CompletionRequest, {"prompt": ["a"] * (MAX_CHOICES + 1)}, "prompt"),
        (CompletionRequest, {"prompt": "a", "n": 1, "best_of": 2}, "best_of"),
        (CompletionRequest, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (CompletionRequest, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CompletionRequest, {"prompt": "a", "suffix": "x"}, "suffix"),
        (EmbeddingRequest, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (EmbeddingRequest, {"input": "a", "endianness": "big"}, "endianness"),
        (TokenizeRequest, {}, "prompt"),
        (TokenizeRequest, {"prompt": "a", "messages": MESSAGES}, "prompt"),
        (TokenizeRequest, {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (TokenizeRequest, {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
    ],
)  # fmt: skip
def test_refused_field_is_named(kind: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(kind, fields)
    assert caught.value.param == param


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
    validate(kind, fields)


@pytest.mark.parametrize(
    ("fields", "is_normalized"), [({}, True), ({"normalize": False}, False), ({"use_activation": False}, False)]
)
def test_either_name_disables_normalisation(fields: dict[str, Any], is_normalized: bool) -> None:
    assert validate(EmbeddingRequest, {"input": "a", **fields}).is_normalized is is_normalized
