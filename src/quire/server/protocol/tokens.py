"""Requests and answers of `/tokenize` and `/detokenize`.

Next to read: `routes/tokens.py`.
"""

from typing import Annotated, Any

from pydantic import Field, model_validator

from quire.server.protocol.answers import Answer
from quire.server.protocol.base import Body, FieldError
from quire.server.protocol.chat import MAX_MESSAGES, MAX_TEMPLATE_VARIABLES, Message, check_template_fields
from quire.server.protocol.fields import MAX_TOKEN_IDS, ModelName, TokenId
from quire.server.protocol.tools import Tools


class TokenizeRequest(Body):
    """Either `prompt` or `messages`."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """Unset: true for a prompt; false for messages, since their template writes the special tokens."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    tools: Tools | None = None
    """Needs messages: the description of the tools is part of the prompt."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        if self.tools is not None and self.messages is None:
            raise FieldError("tools", "tools need messages: a prompt is used unchanged")
        check_template_fields(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        return self


class TokenizeAnswer(Answer):
    """`token_strs`: the vocabulary's entries, if `return_token_strs` was set."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    """Token ids, special ones included."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)]


class DetokenizeAnswer(Answer):
    """The text."""

    prompt: str
