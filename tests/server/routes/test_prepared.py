"""What both kinds of conversation have in common: forms, tools and identity, and whose names errors bear."""

from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.server.caller import Caller
from quire.server.front_end import FrontEnd
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.responses import ResponsesRequest
from quire.server.protocol.validation import validate
from quire.server.routes.prepared import Body, prepare_request, tool_use_of
from quire.types import Request
from tests.engine.builders import byte_tokenizer, make_config
from tests.server.fake_engine import MESSAGES, MODEL

SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
BODIES: list[tuple[type[Body], dict[str, Any], dict[str, Any]]] = [
    (ChatRequest, {"messages": MESSAGES}, {"type": "function", "function": {"name": "now", "parameters": SCHEMA}}),
    (ResponsesRequest, {"input": "hi"}, {"type": "function", "name": "now", "parameters": SCHEMA}),
]
TWO_KINDS = pytest.mark.parametrize(("kind", "fields", "tool"), BODIES, ids=["chat", "responses"])


def prepare(kind: type[Body], fields: dict[str, Any], **chosen: Any) -> Request:
    front_end = FrontEnd(make_config(max_model_len=2048), byte_tokenizer(), None)
    body = validate(kind, {"model": MODEL, **fields})
    prompt = front_end.chat_prompt([{"role": "user", "content": "hi"}])
    caller = Caller("ann", "salt")
    tool_use = tool_use_of(front_end, body)
    return prepare_request(
        front_end, body, caller, prompt, chosen, tool_use, kind="mine", names={"max_tokens": "their_name"}
    )


@TWO_KINDS
def test_form_and_identity(kind: type[Body], fields: dict[str, Any], tool: dict[str, Any]) -> None:
    request = prepare(kind, {**fields, "structured_outputs": {"choice": ["a"]}, "cache_salt": "own"})
    assert request.request_id.startswith("mine-")
    assert (request.client_id, request.hash_extras) == ("ann", ("saltown",))
    assert request.sampling is not None
    assert request.sampling.structured_outputs is not None
    assert request.sampling.structured_outputs.choice == ("a",)


@TWO_KINDS
def test_a_demanded_call_is_the_form(kind: type[Body], fields: dict[str, Any], tool: dict[str, Any]) -> None:
    assert prepare(kind, {**fields, "tools": [tool]}).sampling.structured_outputs is None  # type: ignore[union-attr]
    demanded = prepare(kind, {**fields, "tools": [tool], "tool_choice": "required"}).sampling
    assert demanded is not None
    assert demanded.structured_outputs is not None
    assert demanded.structured_outputs.json is not None


@TWO_KINDS
def test_errors_bear_the_clients_names(kind: type[Body], fields: dict[str, Any], tool: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        prepare(kind, fields, max_tokens=0)
    assert caught.value.field == "their_name"
    with pytest.raises(InvalidParameterError) as caught:
        prepare(kind, fields, logprobs=21)
    assert caught.value.field == "top_logprobs"
