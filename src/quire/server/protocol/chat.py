"""Request and answer of `/v1/chat/completions`.

Next to read: `routes/chat.py`.
"""

import json
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator

from quire.server.protocol.answers import Answer, AnswerHead, ChosenLogprob, PromptLogprobs, Usage
from quire.server.protocol.fields import (
    MAX_INTEGER,
    MAX_LOGPROBS,
    Body,
    ChoiceFields,
    FieldError,
    LenientBody,
    ShortText,
    TextOrList,
    TokenIds,
)
from quire.server.protocol.tools import (
    MAX_TOOLS,
    AllowedTools,
    AnswerToolCall,
    CalledFunction,
    Offer,
    ToolCall,
    ToolChoice,
    Tools,
    offer_of,
)
from quire.text.dialogue import TEMPLATE_ARGUMENTS

MAX_BEGUN = 16
"""Beginnings of answers in one request."""
_T = TypeVar("_T")
MAX_MESSAGES = 2048
MAX_PARTS = 1024
MAX_DOCUMENTS = 256
MAX_TEMPLATE_VARIABLES = 64
RESERVED_VARIABLES = TEMPLATE_ARGUMENTS | {"documents", "self"}
"""Variables of chat templates that `chat_template_kwargs` may not set: other fields do, or none can."""
TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
PartType = Literal[
    "text",
    "input_text",
    "output_text",
    "refusal",
    "thinking",
    "redacted_thinking",
    "reasoning",
    "reasoning_text",
    "reasoning_content",
]
"""Types of parts: text and refusals of the chat and responses APIs, and reasoning as clients and servers write it."""
REASONING_KEYS = ("thinking", "reasoning", "reasoning_content", "text", "content", "summary")


def reasoning_text(value: Any) -> str:
    """Return the text of reasoning: itself, in an object under one of `REASONING_KEYS`, or in a list of such values.

    Reasoning that is encrypted has no text.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(text for item in value if (text := reasoning_text(item)))
    if isinstance(value, dict):
        return next((text for key in REASONING_KEYS if (text := reasoning_text(value.get(key)))), "")
    return ""


class TextPart(LenientBody):
    """A part of a message's content: text, or reasoning of the assistant. Images, audio and files are not supported.

    A checked part has only `type`, which is "text" or "reasoning", and `text`.
    """

    type: PartType
    text: str = ""
    refusal: str | None = None
    thinking: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    content: Any = None
    summary: Any = None

    @model_validator(mode="after")
    def _check(self) -> "TextPart":
        if self.type not in TEXT_TYPES:
            self.type, self.text = "reasoning", reasoning_text(dict(self))
        else:
            name = "refusal" if self.type == "refusal" else "text"
            if (text := getattr(self, name)) is None or name not in self.model_fields_set:
                raise FieldError(name, f"a part of the type {self.type} needs {name}")
            self.type, self.text = "text", text
        self.refusal = self.thinking = self.reasoning = self.reasoning_content = self.content = self.summary = None
        return self


Content = TextOrList[str, Annotated[list[TextPart], Field(max_length=MAX_PARTS)]]


def result_parts(content: Any, *known: str) -> Any:
    """Return the content of a tool's result with a note to the model for each image, file or other part without text.

    An agent cannot take back what a tool has returned: a refusal would end its conversation. `known`: further types of
    parts that stay.
    """
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    return [
        {"type": "text", "text": f"[{kind[:100]}: not shown, because this model reads text only]"}
        if isinstance(kind, str) and kind not in (*get_args(PartType), *known)
        else part
        for part, kind in zip(content, kinds, strict=True)
    ]


ResultContent = Annotated[Content, BeforeValidator(result_parts)]


class Message(LenientBody):
    """A turn. The chat template decides which roles it accepts, and in which order.

    A checked message has its reasoning in `reasoning`, its refusal in `content`, and no empty list of calls.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning_details: list[Any] | None = None
    thinking_blocks: list[Any] | None = None
    """OpenRouter's and LiteLLM's forms of the reasoning. They count only without one of the three texts above."""
    function_call: CalledFunction | None = None
    """OpenAI's older form of a call; its result has the role "function"."""
    audio: None = None

    @model_validator(mode="before")
    @classmethod
    def _read_result(cls, value: Any) -> Any:
        is_result = isinstance(value, dict) and value.get("role") in ("tool", "function")
        return {**value, "content": result_parts(value.get("content"))} if is_result else value

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.content is None and self.role in ("system", "developer", "user"):
            raise FieldError("content", f"a message of the role {self.role} needs content")
        if self.content is None and self.role != "assistant":
            self.content = ""
        thought = self.reasoning or self.reasoning_content or self.thinking
        thought = thought or reasoning_text(self.reasoning_details) or reasoning_text(self.thinking_blocks)
        if isinstance(self.content, list):
            parts = [part for part in self.content if part.type == "text"]
            if len(parts) < len(self.content):
                refuse_reasoning("content", self.role, self.content)
                thought = thought or reasoning_text([part.text for part in self.content if part.type != "text"])
                self.content = parts or None
        self.reasoning = thought or None
        self.reasoning_content = self.thinking = self.reasoning_details = self.thinking_blocks = None
        if self.refusal:
            parts = [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content or []
            self.content = [*parts, TextPart(type="text", text=self.refusal)] if self.content else self.refusal
        self.refusal = None
        self.tool_calls = self.tool_calls or None
        return self


def refuse_reasoning(field: str, role: str, content: Content | None) -> None:
    """Raises: FieldError for reasoning in the content of another role than the assistant's."""
    if role != "assistant" and isinstance(content, list) and any(part.type != "text" for part in content):
        raise FieldError(field, f"a message of the role {role} has no reasoning: send it as text")


def link_calls(messages: list[Message]) -> list[Message]:
    """Give every call an id and every result the id of its call, and turn older function calls into tool calls.

    A result without an id belongs to the first open call of its name, else to the first open call.
    Mutates: `messages`.
    """
    open_calls: list[ToolCall] = []
    for index, message in enumerate(messages):
        if message.function_call is not None:
            message.tool_calls = [*(message.tool_calls or ()), ToolCall(function=message.function_call)]
            message.function_call = None
        for number, call in enumerate(message.tool_calls or ()):
            call.id = call.id or f"call_{index}_{number}"
        if message.role in ("tool", "function"):
            message.role = "tool"
            if not message.tool_call_id and open_calls:
                named = (call for call in open_calls if call.function.name == message.name)
                message.tool_call_id = next(named, open_calls[0]).id
            open_calls = [call for call in open_calls if call.id != message.tool_call_id]
        else:
            open_calls = list(message.tool_calls or ())
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(link_calls)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(Body):
    """Options of reasoning, as OpenAI's `/v1/responses` and OpenRouter have them.

    Fields:
        max_tokens: most tokens of reasoning.
        exclude: leave the reasoning out of the answer.
        summary, generate_summary, context, mode: without effect.
    """

    effort: ReasoningEffort | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_INTEGER)
    enabled: bool | None = None
    exclude: bool | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: ShortText | None = None


class ThinkingOptions(Body):
    """Options of reasoning, as Anthropic has them. `adaptive` leaves the choice to the template; `display` is without
    effect.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0, le=MAX_INTEGER)
    display: ShortText | None = None


class ChatRequest(ChoiceFields, defer_build=False):  # a server's first chat need not wait for it
    """OpenAI's fields and vLLM's."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    """Unset: true, but false with `continue_final_message`."""
    continue_final_message: bool | None = False
    answer_token_ids: Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_BEGUN)] | None = None
    """First tokens of answers, one list for each: an answer goes on behind them, and what is returned follows them."""
    add_special_tokens: bool | None = False
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """Unset: "auto"."""
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    thinking_token_budget: int | None = Field(
        None,
        ge=-1,
        le=MAX_INTEGER,
        validation_alias=AliasChoices("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"),
    )
    """vLLM's name and llama.cpp's for the most tokens of reasoning; -1: no limit."""
    include_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        self.check()
        return self

    def check(self) -> None:
        """Raises: FieldError for fields that contradict each other. Mutates: the fields of `settle_reasoning`."""
        self.check_together()
        self.settle_reasoning()
        check_template_fields(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.answer_token_ids and self.continue_final_message:
            raise FieldError("answer_token_ids", "answer_token_ids and continue_final_message exclude each other")
        self.offer()

    def offer(self) -> Offer | None:
        """Return the tools that may be called. Raises: FieldError."""
        offer = offer_of(self.tools, self.tool_choice)
        if self.demands_call and self.structured_outputs is not None:
            raise FieldError("tool_choice", "tool_choice demands a call, which excludes structured_outputs")
        return offer

    @property
    def demands_call(self) -> bool:
        """Return whether the answer must be a call."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        return mode not in (None, "none", "auto")

    def settle_reasoning(self) -> None:
        """Set `reasoning_effort` and `include_reasoning` to what `reasoning` and `thinking` say too.

        Mutates: these two fields. Raises: FieldError for values that contradict each other.
        """
        options = self.reasoning or ReasoningOptions()
        self.reasoning_effort = _agreed({"reasoning_effort": self.reasoning_effort, "reasoning.effort": options.effort})
        excluded = None if options.exclude is None else not options.exclude
        self.include_reasoning = _agreed({"include_reasoning": self.include_reasoning, "reasoning.exclude": excluded})
        if self.enables_reasoning is False:
            self.reasoning_effort = "none"
        _ = self.reasoning_budget

    @property
    def enables_reasoning(self) -> bool | None:
        """Return whether the request turns reasoning on or off; None leaves it to the template. Raises: FieldError."""
        options, thinking = self.reasoning or ReasoningOptions(), self.thinking
        effort = self.reasoning_effort
        return _agreed(
            {
                "reasoning_effort": None if effort is None else effort != "none",
                "reasoning.enabled": options.enabled,
                "reasoning.max_tokens": True if options.max_tokens else None,
                "thinking.type": {"enabled": True, "disabled": False}.get(thinking.type) if thinking else None,
                "thinking.budget_tokens": True if thinking and thinking.budget_tokens else None,
            }
        )

    @property
    def reasoning_budget(self) -> int | None:
        """Return the most tokens of reasoning; None: the client set no limit. Raises: FieldError."""
        tokens = self.thinking_token_budget
        return _agreed(
            {
                "thinking_token_budget": None if tokens == -1 else tokens,
                "reasoning.max_tokens": self.reasoning.max_tokens if self.reasoning else None,
                "thinking.budget_tokens": self.thinking.budget_tokens if self.thinking else None,
            }
        )


def _agreed(values: dict[str, _T | None]) -> _T | None:
    """Return the value that all set fields have; None if none is set. Raises: FieldError."""
    given = [name for name, value in values.items() if value is not None]
    for name in given:
        if values[name] != values[given[0]]:
            raise FieldError(name, f"{name} contradicts {given[0]}: leave out one of the two")
    return values[given[0]] if given else None


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
    reasoning: str | None = None
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
