"""A chat template: the Jinja2 program of a model that turns messages into the prompt text it was trained on; the
rendered chat, and the plain data that a template may have.

`ChatTemplate` compiles it, renders in a sandbox and reports every failure as a `ChatTemplateError`. Must not know:
tokenizers, requests, the form of messages. Jinja2 is imported on first use. Next to read: `template_sandbox.py`, then
`template_probe.py`, which finds out what a template does.
"""

import functools
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import ChatTemplateError

if TYPE_CHECKING:
    from quire.text.template_sandbox import TemplateEnvironment

MAX_TEMPLATE_CHARACTERS = 100_000
"""Such a template takes up to 4 s and 400 MB to compile. The longest of 110 published ones has 20,000 characters."""


class TemplateLimitReachedError(ChatTemplateError):
    """The template took too much time or memory."""


class ChatTemplate:
    """A compiled template. Use `compile_chat_template`, which keeps the last ones."""

    def __init__(self, source: str) -> None:
        """Compile the Jinja2 program `source`. Raises: ChatTemplateError."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters, more than the {MAX_TEMPLATE_CHARACTERS} allowed"
            )
        with _as_chat_template_error():
            self._template = _environment().compile_template(source)

    @property
    def free_variables(self) -> list[str]:
        """Return the names that the template may read from outside, sorted."""
        return self._template.free_variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages in the form that the template reads: plain data. Raises: ChatTemplateError."""
        values = {"documents": None, "tools": None, **(variables or {})}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        with _as_chat_template_error():
            return self._template.render(values)


@functools.lru_cache(maxsize=32)
def compile_chat_template(source: str) -> ChatTemplate:
    """Compile a template, or return it compiled before. Raises: ChatTemplateError."""
    return ChatTemplate(source)


def without_comments(source: str) -> str:
    """Return the source of a template without its comments."""
    parts, end = [], 0
    while (start := source.find("{#", end)) >= 0 and (close := source.find("#}", start + 2)) >= 0:
        parts.append(source[end:start])
        end = close + 2
    return "".join([*parts, source[end:]])


@functools.cache
def _environment() -> "TemplateEnvironment":
    from quire.text.template_sandbox import TemplateEnvironment

    return TemplateEnvironment()


@contextmanager
def _as_chat_template_error() -> Iterator[None]:
    """Raise every error as `ChatTemplateError`: a template can raise any exception of Python."""
    from jinja2 import TemplateSyntaxError

    from quire.text.template_budget import TemplateLimitError
    from quire.text.template_sandbox import TemplateRefusalError

    try:
        yield
    except TemplateLimitError as error:
        raise TemplateLimitReachedError(f"the chat template was stopped: {_one_line(error)}") from error
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


# --- A rendered chat, in which the text of a message never becomes a special token ----------------
# A message may contain "<|im_end|>". Encoded as the end of a turn, it would let a user write the turns of other roles.
# In a rendered prompt the special tokens of messages and of the template look the same. Therefore each special token in
# a message is marked before the template runs, and the rendered text is cut inside it: the pieces are encoded one by
# one, and no piece contains it whole.


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`pieces`: the prompt, cut inside each special token that comes from a message."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the prompt."""
        return "".join(self.pieces)


class SpecialTokenMarks:
    """Finds special tokens in messages. `tokens`: their texts. Tokens of one character cannot be cut."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token for token in tokens if len(token) > 1)
        self._lengths = sorted(set(map(len, self._tokens)))
        # To compile an alternative for each of Gemma's 6,414 tokens took 0.24 s.
        firsts = "".join(re.escape(character) for character in sorted({token[0] for token in self._tokens}))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def render(self, render: Callable[[Callable[[Any], Any]], str]) -> RenderedChat:
        """Call `render` and cut its text. It must pass every value of the client through the function that it gets.

        Raises: ChatTemplateError for values that are nested too deep.
        """
        mark = f"x{secrets.token_hex(16)}x"
        try:
            text = render(lambda value: self._marked(value, mark))
        except RecursionError:
            raise ChatTemplateError("a message, tool or variable is nested too deep for the chat template") from None
        return RenderedChat(tuple(text.split(mark)))

    def _marked(self, value: Any, mark: str) -> Any:
        if self._first is None:
            return value
        if isinstance(value, str):
            starts = (match.start() for match in self._first.finditer(value))
            places = [start + 1 for start in starts if self._is_token_at(value, start)]
            if not places:
                return value
            return mark.join(value[start:end] for start, end in zip([0, *places], [*places, None], strict=True))
        if isinstance(value, Mapping):
            return {self._marked(name, mark): self._marked(item, mark) for name, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [self._marked(item, mark) for item in value]
        return value

    def _is_token_at(self, text: str, start: int) -> bool:
        return any(text[start : start + length] in self._tokens for length in self._lengths)


# --- Plain data: objects with methods must not reach a template -----------------------------------

_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def unicode_text(text: str) -> str:
    """Return the text with U+FFFD for each NUL character and each half of a surrogate pair.

    Output of programs may have them: bytes of a file, or a text that was cut off within a pair of UTF-16.
    """
    return _NO_TEXT.sub("\ufffd", text)


def plain(value: Any, name: str) -> Any:
    """Return a copy of JSON-like data in plain types. Raises: ChatTemplateError for other data, by `name`."""
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
