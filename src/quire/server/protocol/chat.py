"""Request and answer of `/v1/chat/completions`.

Next to read: `routes/chat.py`.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from quire.server.protocol.answers import Answer, AnswerHead, ChosenLogprob, PromptLogprobs, Usage
from quire.server.protocol.fields import MAX_INTEGER, MAX_LOGPROBS, Body, ChoiceFields, FieldError, TextOrList
from quire.server.protocol.tools import (
    MAX_TOOLS,
    AnswerToolCall,
    Offer,
    ToolCall,
    ToolChoice,
    Tools,
    offer_of,
)
from quire.text.chat_template import TEMPLATE_ARGUMENTS

MAX_MESSAGES = 2048
MAX_PARTS = 1024
MAX_DOCUMENTS = 256
MAX_TEMPLATE_VARIABLES = 64
RESERVED_VARIABLES = TEMPLATE_ARGUMENTS | {"documents", "self"}
"""Variables of chat templates that `chat_template_kwargs` may not set: other fields do, or none can."""


class TextPart(Body):
    """A part of a message's content. Images and audio are not supported."""

    type: Literal["text"]
    text: str


Content = TextOrList[str, Annotated[list[TextPart], Field(max_length=MAX_PARTS)]]


class Message(Body):
    """A turn. The chat template decides which roles it accepts, and in which order."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    """`annotations`, `audio` and `function_call` are part of OpenAI's answers, which clients send back unchanged."""

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise FieldError("content", f"a message of the role {self.role} needs content")
        return self


class ChatRequest(ChoiceFields):
    """OpenAI's fields and vLLM's."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    """Unset: true, but false with `continue_final_message`."""
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """Unset: "auto"."""
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        self.check()
        return self

    def check(self) -> None:
        """Raises: FieldError for fields that contradict each other."""
        self.check_together()
        check_template_fields(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs: true")
        self.offer()

    def offer(self) -> Offer | None:
        """Return the tools that may be called. Raises: FieldError."""
        offer = offer_of(self.tools, self.tool_choice)
        if offer is not None and offer.demands and self.structured_outputs is not None:
            raise FieldError("tool_choice", "tool_choice demands a call, which excludes structured_outputs")
        return offer


def check_template_fields(
    add_generation_prompt: bool | None, continue_final_message: bool | None, variables: dict[str, Any] | None
) -> None:
    """Raises: FieldError for fields that exclude each other, and for a template variable with a reserved name."""
    if continue_final_message and add_generation_prompt:
        raise FieldError(
            "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
        )
    for name in variables or {}:
        if name in RESERVED_VARIABLES:
            raise FieldError(
                "chat_template_kwargs", f"chat_template_kwargs cannot set {json.dumps(name)}: it is reserved"
            )


# --- Answers ----------------------------------------------------------------------------------


class ChatLogprobs(Answer):
    """Log-probabilities with an entry per token."""

    content: list[ChosenLogprob]
    refusal: None = None


class AnswerMessage(Answer):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(Answer):
    """An answer among `n`."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(AnswerHead):
    """The whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
