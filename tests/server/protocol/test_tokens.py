from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.protocol.tokens import TokenizeRequest
from quire.server.protocol.validation import validate
from tests.server.fake_engine import MESSAGES


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_refuses(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(TokenizeRequest, body)
    assert caught.value.param == param


def test_an_empty_prompt_has_no_tokens_but_is_a_prompt() -> None:
    assert validate(TokenizeRequest, {"prompt": ""}).prompt == ""
