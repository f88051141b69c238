"""The answer of `/v1/responses` as models. Next to read: `document.py`."""

from typing import Any, Literal

from quire.server.protocol.responses import AllowedFunctions, FunctionChoice, FunctionTool, ItemStatus
from tests.server.answers import Answer, ChosenLogprob


class OutputText(Answer):
    """The content of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenLogprob]


class OutputMessage(Answer):
    """Text of the model."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputFunctionCall(Answer):
    """A call by the model; `arguments` is JSON as text. The client sends its result back with the same `call_id`."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningText(Answer):
    """Text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answer):
    """Reasoning of the model before its answer. `summary` is always empty."""

    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: ItemStatus


class IncompleteDetails(Answer):
    """The reason for an early end."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """Prompt tokens found in the prefix cache. `cache_write_tokens` is always 0: nothing is charged."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """Always 0: tokens are counted together."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """OpenAI's token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Answer):
    """An error in a stream that had begun. `code`: one of those that OpenAI's clients know."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseObject(Answer):
    """The whole answer, or its state in a stream."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage | OutputFunctionCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | FunctionChoice | AllowedFunctions
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
