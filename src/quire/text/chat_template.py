"""A chat template: the Jinja2 program of a model that turns messages into the prompt text it was trained on.

`ChatTemplate` compiles it, renders in a sandbox and reports every failure as a `ChatTemplateError`. Must not know:
tokenizers, requests, the form of messages. Jinja2 is imported on first use. Next to read: `template_sandbox.py`, then
`template_probe.py`, which finds out what a template does.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
