"""From chat messages to the prompt text that a model was trained on.

A chat template is a Jinja2 program that comes with the model. `ChatTemplate` compiles it, checks the messages, renders
them in a sandbox and reports every failure as a `ChatTemplateError`. Must not know: tokenizers, requests. Jinja2 is
imported on first use. Next to read: `template_sandbox.py`.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from quire.errors import ChatTemplateError

if TYPE_CHECKING:
    from quire.text.template_sandbox import TemplateEnvironment

MAX_TEMPLATE_CHARACTERS = 1_000_000
TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template"}
)
"""Arguments of `Tokenizer.render_chat`, which no variable of a template may be named like."""
_END_MARK = "\ue000end of the final message\ue001 "
"""Put after the final message to find it in the rendered text; the space shows whether the template trims."""


class ChatTemplate:
    """A compiled template. Use `compile_chat_template`, which keeps the last ones."""

    def __init__(self, source: str) -> None:
        """Compile the Jinja2 program `source`. Raises: ChatTemplateError."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters, more than the {MAX_TEMPLATE_CHARACTERS} allowed"
            )
        with _as_chat_template_error():
            environment = _environment()
            self._template = environment.compile_template(source)
            self._reads_parts = environment.loops_over_content(source)
        self._names_developer = re.search(r"""['"]developer['"]""", source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render `messages` (role, content and the other keys that the template reads).

        Content is text, None, or a list of `{"type": "text", "text": …}`. Where the template expects text, the parts
        of a list are joined by newlines. A template that does not name the role `developer`, OpenAI's later name for
        `system`, gets `system` instead. Raises: ChatTemplateError.
        """
        from quire.text.template_sandbox import render

        chat = _checked(messages, "messages", _Messages, "objects with a role and text: this engine reads text only")
        tool_list = _checked(tools, "tools", _Tools, "objects such as {'type': 'function', 'function': {...}}")
        for message in chat:
            if not self._reads_parts and isinstance(message.get("content"), list | tuple):
                message["content"] = "\n".join(part["text"] for part in message["content"])
            if not self._names_developer and message["role"] == "developer":
                message["role"] = "system"
        final_text = _mark_final_message(chat) if continue_final_message else ""
        values = {"documents": None, **{name: _plain(value, name) for name, value in (variables or {}).items()}}
        values |= {"messages": chat, "tools": tool_list, "add_generation_prompt": add_generation_prompt}
        with _as_chat_template_error():
            text = render(self._template, values)
        return _cut_after_final_message(text, final_text) if continue_final_message else text


@functools.lru_cache(maxsize=32)
def compile_chat_template(source: str) -> ChatTemplate:
    """Compile a template, or return it compiled before. Raises: ChatTemplateError."""
    return ChatTemplate(source)


@functools.cache
def _environment() -> "TemplateEnvironment":
    from quire.text.template_sandbox import TemplateEnvironment

    return TemplateEnvironment()


@contextmanager
def _as_chat_template_error() -> Iterator[None]:
    """Raise every error as `ChatTemplateError`: a template can raise any exception of Python."""
    from jinja2 import TemplateSyntaxError

    from quire.text.template_sandbox import TemplateLimitError, TemplateRefusalError

    try:
        yield
    except TemplateLimitError as error:
        raise ChatTemplateError(f"the chat template was stopped: {_one_line(error)}") from error
    except TemplateRefusalError as error:
        raise ChatTemplateError(f"the chat template refused the messages: {_one_line(error)}") from error
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template has an error in line {error.lineno}: {_one_line(error)}") from error
    except Exception as error:
        raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    message = getattr(error, "message", None) or str(error)
    text = " ".join(str(message).split())
    return text if len(text) <= 300 else text[:297] + "..."


# --- The messages -----------------------------------------------------------------------------


class _TextPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct):
    """Keys that every message has, of types that templates expect."""

    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str | list[_TextPart] | None = None


_Messages = Annotated[list[_Message], msgspec.Meta(min_length=1)]
_Tools = list[dict[str, Any]] | None


def _checked(value: Any, name: str, kind: Any, expected: str) -> Any:
    """Return a copy of JSON-like data, with all of its keys, if it is of the type `kind`."""
    plain = _plain(value, name)
    try:
        msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise ChatTemplateError(f"{str(error).replace('$', name)}; {name} must be {expected}") from None
    return plain


def _plain(value: Any, name: str) -> Any:
    """Copy JSON-like data in plain Python types: objects with methods must not reach a template."""
    try:
        return msgspec.to_builtins(value, builtin_types=(bytes, bytearray), enc_hook=_plain_base)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(
            f"{name} cannot be passed to the chat template, which takes text, numbers, booleans, null, lists and "
            f"objects: {error}"
        ) from None


_BASES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (str, str.__str__), (int, int.__int__), (float, float.__float__), (Mapping, dict), (Sequence, list),
)  # fmt: skip
"""Types of plain data, and functions that make one of a subclass."""


def _plain_base(value: Any) -> Any:
    """Return a value of a subclass as one of its base class."""
    for base, make in _BASES:
        if isinstance(value, base):
            return make(value)
    raise TypeError(f"{type(value).__name__} is none of these")


# --- Continuing the final message -------------------------------------------------------------


def _mark_final_message(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text and return that text. Mutates: `chat`."""
    message = chat[-1]
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return content
    if isinstance(content, list | tuple) and content:
        part = content[-1]
        text: str = part["text"]
        part["text"] = text + _END_MARK
        return text
    raise ChatTemplateError("continue_final_message needs text in the last message, which has none")


def _cut_after_final_message(text: str, final_text: str) -> str:
    mark = _END_MARK.strip()
    end = text.rfind(mark)
    if end < 0 or final_text.strip() not in text[:end]:
        raise ChatTemplateError(
            "continue_final_message needs the last message in the prompt, but the chat template changes or drops it; "
            "end the conversation with text that the template keeps"
        )
    was_trimmed = not text.startswith(_END_MARK, end)
    return text[:end].rstrip() if was_trimmed else text[:end]
