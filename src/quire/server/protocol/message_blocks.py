"""Messages of `/v1/messages`: their blocks of content, and the conversion to messages of the chat API.

Calls and reasoning are blocks of the assistant's content, results of calls blocks of the user's. Unknown keys inside
blocks are dropped; `cache_control` has no effect, since every prefix is cached. Next to read: `messages.py`.
"""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from quire.server.protocol.chat import MAX_PARTS, Message, TextPart, result_parts
from quire.server.protocol.fields import FieldError, LenientBody, TextOrList
from quire.server.protocol.tools import CalledFunction, ToolCall

CALL_ID = "toolu_"
"""Beginning of the ids of calls."""
_ESCAPES = {".": "-2e-", ":": "-3a-"}
"""Characters of the ids of some models that Anthropic's may not have."""
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""Line that an agent puts before its system text for Anthropic's accounting. It says nothing to the model, and changes
with each request: no prompt would ever begin like the one before."""


def shown_call_id(call_id: str) -> str:
    """Return the id of a call as one of Anthropic's; `own_call_id` is the inverse."""
    escaped = "".join(_ESCAPES.get(character, character) for character in call_id)
    return CALL_ID + re.sub(r"[^A-Za-z0-9_-]", "_", escaped)


def own_call_id(call_id: str) -> str:
    """Return the id as the model wrote it, so that the prompt repeats the call unchanged."""
    found = call_id.removeprefix(CALL_ID)
    for character, escape in _ESCAPES.items():
        found = found.replace(escape, character)
    return found


# --- Blocks -----------------------------------------------------------------------------------


BlockId = Annotated[str, Field(min_length=1, max_length=256)]
LongName = Annotated[str, Field(min_length=1, max_length=256)]


def _tags(*kinds: str) -> Callable[[Any], str]:
    """Return a discriminator by `type`. Other types are checked as text, whose error says what is read here."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{kind if kind in kinds else 'text'}>"

    return tag


class TextBlock(LenientBody):
    """Text."""

    type: Literal["text"]
    text: str


Texts = TextOrList[str, Annotated[list[TextBlock], Field(max_length=MAX_PARTS)]]


class ThinkingBlock(LenientBody):
    """Reasoning of an earlier answer. Its `signature` is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(LenientBody):
    """Encrypted reasoning of another server, which nothing here can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(LenientBody):
    """A call from an earlier answer."""

    type: Literal["tool_use"]
    id: BlockId
    name: LongName
    input: dict[str, Any]


class ToolResultBlock(LenientBody):
    """The result of the call whose id is `tool_use_id`."""

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: Annotated[Texts, BeforeValidator(result_parts)] | None = None
    is_error: bool | None = None


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_tags("tool_result")),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    Discriminator(_tags("thinking", "redacted_thinking", "tool_use")),
]


def _turn_parts(content: Any) -> Any:
    """Return the content of a user's turn. Beside results, agents send files that a tool has read as further blocks."""
    blocks = content if isinstance(content, list) else ()
    has_result = any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks)
    return result_parts(content, "tool_result") if has_result else content


class UserTurn(LenientBody):
    """Text of the user, and results of calls."""

    role: Literal["user"]
    content: Annotated[
        TextOrList[str, Annotated[list[UserBlock], Field(max_length=MAX_PARTS)]], BeforeValidator(_turn_parts)
    ]


class AssistantTurn(LenientBody):
    """An earlier answer, unchanged; the last message may be the beginning of the answer."""

    role: Literal["assistant"]
    content: TextOrList[str, Annotated[list[AssistantBlock], Field(max_length=MAX_PARTS)]]


class SystemTurn(LenientBody):
    """Instructions in the course of a conversation."""

    role: Literal["system"]
    content: Texts


def _tag_of_role(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"<{role if role in ('assistant', 'system') else 'user'}>"


def _check_role(value: Any) -> Any:
    role = value.get("role") if isinstance(value, dict) else "user"
    if role not in ("user", "assistant", "system"):
        raise FieldError(
            "role",
            f'role must be "user" or "assistant", or "system" for later instructions, got {json.dumps(role)[:100]}',
        )
    return value


Turn = Annotated[
    Annotated[UserTurn, Tag("<user>")]
    | Annotated[AssistantTurn, Tag("<assistant>")]
    | Annotated[SystemTurn, Tag("<system>")],
    Discriminator(_tag_of_role),
    BeforeValidator(_check_role),
]


# --- Conversion to the chat API ---------------------------------------------------------------


def system_messages(system: str | list[TextBlock] | None) -> list[Message]:
    """Return `system` as one message, whose blocks are joined in their order; without text as none."""
    texts = [system or ""] if not isinstance(system, list) else [block.text for block in system]
    texts = [_BILLING_LINE.sub("", text) for text in texts]
    text = "\n\n".join(filter(None, texts))
    return [Message(role="system", content=text)] if text else []


def is_begun_answer(messages: list[Message]) -> bool:
    """Return whether the last message is the beginning of the answer; without text it is none, and left out.

    Mutates: `messages`. Raises: FieldError if it calls tools.
    """
    last = messages[-1]
    if last.role != "assistant":
        return False
    if last.tool_calls:
        raise FieldError("messages", "the last message calls tools: add a user message with their results")
    if last.content or len(messages) == 1:
        return bool(last.content)
    messages.pop()
    return False


def chat_messages(turn: UserTurn | AssistantTurn | SystemTurn) -> list[Message]:
    """Return a turn as messages: results of calls are messages of their own."""
    if isinstance(turn, AssistantTurn):
        return [_assistant_message(turn)]
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    found: list[Message] = []
    texts: list[TextBlock] = []
    for block in turn.content:
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        found += [Message(role=turn.role, content=_content(texts))] if texts else []
        texts = []
        found.append(Message(role="tool", tool_call_id=own_call_id(block.tool_use_id), content=_result(block)))
    return found if found and not texts else [*found, Message(role=turn.role, content=_content(texts))]


def _content(blocks: list[TextBlock]) -> str | list[TextPart]:
    if len(blocks) == 1:
        return blocks[0].text
    return [TextPart(type="text", text=block.text) for block in blocks if block.text] or ""


def _result(block: ToolResultBlock) -> str | list[TextPart]:
    """Return the content of a result. An error is named as one: the chat API has no field for it."""
    content = block.content or ""
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    if block.is_error and not any("error" in text.lower() for text in texts):
        texts[:1] = [f"Error: {texts[0]}" if texts and texts[0] else "Error"]
    return texts[0] if len(texts) == 1 else [TextPart(type="text", text=text) for text in texts if text] or ""


def _assistant_message(turn: AssistantTurn) -> Message:
    if isinstance(turn.content, str):
        return Message(role="assistant", content=turn.content)
    text = "".join(block.text for block in turn.content if isinstance(block, TextBlock))
    reasoning = "\n".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock))
    message = Message(role="assistant", content=text, reasoning=reasoning or None)
    # Not checked: names of tools are longer here than in the chat API.
    message.tool_calls = [
        ToolCall.model_construct(
            id=own_call_id(block.id),
            type="function",
            function=CalledFunction.model_construct(
                name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)
            ),
        )
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ] or None
    return message
