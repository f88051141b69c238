"""`/v1/chat/completions`: the request, and what its answer is made of.

Next to read: `routes/chat.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.protocol.fields import MAX_INTEGER, Body, SamplingFields, StreamOptions

MAX_MESSAGES = 2048
MAX_TOOLS = 128


class TextPart(Body):
    """One piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn. What a role needs beyond this is the chat template's business."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(None, max_length=256)
    refusal: str | None = None


class ChatRequest(SamplingFields):
    """OpenAI's fields and vLLM's."""

    model: str = Field(max_length=512)
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_INTEGER)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=MAX_INTEGER)] = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
