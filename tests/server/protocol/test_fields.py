"""Each numeric field of each request at its limits and with values of other types.

The fields and their limits are read from the schema, so that a new field is tested without a line here.
"""

import json
from typing import Any

import pytest

from quire.sampling_params import SamplingParams
from quire.server.errors import ApiError
from quire.server.openapi import ENDPOINTS
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.fields import SHARED_NAMES, Body
from quire.server.protocol.prompts import CompletionRequest
from quire.server.protocol.validation import known_names, parse_body, validate
from tests.server.fake_engine import CHAT

MINIMAL: dict[str, dict[str, Any]] = {
    "ChatRequest": {**CHAT, "logprobs": True},
    "CompletionRequest": {"model": "m", "prompt": "a"},
    "LoadAdapterRequest": {"lora_name": "a", "lora_path": "/a"},
    "UnloadAdapterRequest": {"lora_name": "a"},
    "InfillRequest": {"input_prefix": "a", "input_suffix": "b"},
    "ResponsesRequest": {"model": "m", "input": "a"},
    "MessagesRequest": {"model": "m", "max_tokens": 1, "messages": CHAT["messages"]},
    "CountTokensRequest": {"model": "m", "messages": CHAT["messages"]},
    "EmbeddingRequest": {"model": "m", "input": "a"},
    "ScoreRequest": {"queries": "a", "documents": ["b"]},
    "RerankRequest": {"query": "a", "documents": ["b"]},
    "ClassifyRequest": {"input": "a"},
    "TokenizeRequest": {"prompt": "a"},
    "DetokenizeRequest": {"tokens": [1]},
}
KINDS = list(dict.fromkeys(endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None))
OTHER_TYPES = ['"1"', "true", "[]", "{}"]
CROSS_CHECKED = {("CompletionRequest", "best_of"), ("CompletionRequest", "max_tokens")}
"""Their values depend on other fields as well: see test_prompts.py."""


def numeric_fields() -> list[tuple[Any, str, dict[str, Any], bool]]:
    """Request, field, its number's schema, and whether it may be null."""
    found = []
    for kind in KINDS:
        for name, schema in kind.model_json_schema()["properties"].items():
            members = schema.get("anyOf", [schema])
            numbers = [member for member in members if member.get("type") in ("integer", "number")]
            if numbers:
                found.append((kind, name, numbers[0], {"type": "null"} in members))
    return found


def values_of(schema: dict[str, Any], *, may_be_null: bool) -> dict[str, bool]:
    """JSON texts of values, and whether the field accepts them."""
    values: dict[str, bool] = dict.fromkeys(OTHER_TYPES, False) | {"null": may_be_null}
    is_integer = schema["type"] == "integer"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema["maximum"]
    numbers: list[float] = [low - 1, low, high, high + 1, 0, -1, 2**31, 2**63]
    for number in numbers:
        above = number > low if "exclusiveMinimum" in schema else number >= low
        is_whole = not is_integer or float(number).is_integer()
        values[str(int(number))] = above and number <= high and is_whole
    return values | ({"1.5": False} if is_integer else {})


def body_with(kind: Any, name: str, text: str) -> bytes:
    others = {key: value for key, value in MINIMAL[kind.__name__].items() if key != name}
    return (json.dumps(others)[:-1] + f', "{name}": {text}}}').encode()


FIELDS = numeric_fields()


@pytest.mark.parametrize(
    ("kind", "name", "schema", "may_be_null"), FIELDS, ids=[f"{kind.__name__}-{name}" for kind, name, _, _ in FIELDS]
)
def test_numeric_field_at_its_limits(kind: Any, name: str, schema: dict[str, Any], may_be_null: bool) -> None:
    for text, is_accepted in values_of(schema, may_be_null=may_be_null).items():
        body = body_with(kind, name, text)
        if is_accepted:
            if (kind.__name__, name) not in CROSS_CHECKED:
                assert isinstance(parse_body(kind, body), kind)
            continue
        with pytest.raises(ApiError) as caught:
            parse_body(kind, body)
        found = (caught.value.status, caught.value.param, caught.value.code)
        assert found == (400, name, "invalid_parameter"), text
    for text in ("NaN", "Infinity", "-Infinity", "1e400"):
        with pytest.raises(ApiError) as caught:
            parse_body(kind, body_with(kind, name, text))
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_every_sampling_param_but_functions_and_detokenize_can_be_sent() -> None:
    unsent = set(SamplingParams.__dataclass_fields__) - known_names()
    # Answers are text, and functions cannot be sent.
    assert unsent <= {"detokenize", "logits_processors"}
    assert "temperature" in SHARED_NAMES


def test_top_p_of_0_selects_the_most_likely_token() -> None:
    chosen = validate(ChatRequest, {**CHAT, "top_p": 0}).sampling_values()
    assert 0 < SamplingParams(**chosen).top_p <= 1e-6


def test_every_request_forbids_unknown_fields() -> None:
    for kind in KINDS:
        assert issubclass(kind, Body)
        with pytest.raises(ApiError):
            validate(kind, {**MINIMAL[kind.__name__], "no_such_field": 1})


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"), ([], "prompt"), ([[]], "prompt.0"), ([1, "a"], "prompt.1"), (["a", 1], "prompt.1"),
        ([[1], "a"], "prompt.1"), ([True], "prompt.0"), ([-1], "prompt.0"), ([None], "prompt.0"), ({}, "prompt"),
    ],
)  # fmt: skip
def test_malformed_prompt_is_refused(prompt: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(CompletionRequest, {"model": "m", "prompt": prompt})
    assert caught.value.param == param
