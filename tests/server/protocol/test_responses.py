from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.responses import WITH_LOGPROBS, ResponsesRequest
from quire.server.protocol.validation import validate

BODY = {"model": "m", "input": "a"}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"store": True}, "invalid_parameter", "store"),
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
    ],
)
def test_what_would_need_a_store_or_change_the_answer_is_refused(
    fields: dict[str, Any], code: str, param: str
) -> None:  # fmt: skip
    with pytest.raises(ApiError) as caught:
        validate(ResponsesRequest, {**BODY, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)


def test_images_are_refused() -> None:
    content = [{"type": "input_image", "image_url": "http://example.com/a.png"}]
    with pytest.raises(ApiError, match="reads text only") as caught:
        validate(ResponsesRequest, {**BODY, "input": [{"role": "user", "content": content}]})
    assert caught.value.code == "unsupported_content"


def test_log_probabilities_are_asked_for_in_either_way() -> None:
    assert not validate(ResponsesRequest, BODY).wants_logprobs
    assert validate(ResponsesRequest, {**BODY, "top_logprobs": 2}).wants_logprobs
    assert validate(ResponsesRequest, {**BODY, "include": [WITH_LOGPROBS]}).wants_logprobs
    assert validate(ResponsesRequest, {**BODY, "top_logprobs": 1, "tools": [{"type": "function", "name": "f"}]}).offer()


def test_an_output_item_can_be_sent_back() -> None:
    part = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}
    assert validate(ResponsesRequest, {**BODY, "store": False, "input": [{"role": "user", "content": "a"}, item]})
