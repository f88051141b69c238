"""What a chat template may use: steps, time, printed text, and the size of any value.

Jinja2 bounds none of these except `range`. One rendering draws on one budget; operators, methods and filters whose
result can be much larger than what they are given are checked before they run. Must not know: messages, the
environment. Next to read: `template_sandbox.py`, which puts these checks into a template.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext

MAX_OUTPUT_CHARACTERS = 4 * 2**20
"""The rendered chat, and any one value on the way."""
MAX_PRINTED_CHARACTERS = 8 * MAX_OUTPUT_CHARACTERS
"""All text printed, into macros and block assignments too."""
MAX_STEPS = 300_000
"""Loop rounds and calls."""
MAX_SECONDS = 0.25
"""Of processor time: a busy machine refuses nothing. 2,048 messages take 0.03 s, measured."""
SHORT_SECONDS = 0.05
"""What takes longer is costly: one such rendering runs at a time, and half of that time."""
PAUSE_EVERY_SECONDS = 0.001
PAUSE_SECONDS = 0.001
"""With 0.25 s at a stretch in two threads, the tokens of others came 2.6 times as far apart (2 CPUs). A lower priority
would not do: the interpreter's lock is held meanwhile, and everybody would wait for a thread that gets no turn."""
_STEPS_PER_LOOK = 16
"""The clock of a thread is a system call."""
_MAX_LIST_LEN = 100_000
_MAX_WIDTH = 10_000
_MAX_INTEGER_BITS = 4096
_MAX_JSON_INDENT = 100
_WIDE_FIELD = re.compile(r"%(\([^)]*\))?[-+ #.\d]*(\*|\d{5,})|\{[^{}]*:[^{}]*\d{5,}|\{[^{}]+\{")
"""Fields of `%` and of `str.format` that are five digits wide or take their width from an argument."""


class TemplateLimitError(jinja2.TemplateError):
    """A template used more than it may."""


@dataclass(slots=True)
class _Budget:
    """What one rendering has left."""

    start_s: float
    """Of `time.thread_time()`."""
    num_steps: int
    num_characters: int
    pause_s: float
    """When it stands aside next, in seconds of processor time from its start."""
    is_costly: bool = False

    def step(self) -> None:
        self.num_steps -= 1
        if self.num_steps < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} loop rounds and calls")
        if self.num_steps % _STEPS_PER_LOOK == 0:
            self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        used_s = time.thread_time() - self.start_s
        if used_s > MAX_SECONDS:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} s of processor time")
        if used_s < self.pause_s:
            return
        if not self.is_costly:
            _costly.acquire()
            self.is_costly = True
        self.pause_s = used_s + PAUSE_EVERY_SECONDS
        time.sleep(PAUSE_SECONDS)

    def print(self, num_characters: int) -> None:
        self.num_characters -= num_characters
        if self.num_characters < 0:
            raise TemplateLimitError(f"it prints more than {MAX_PRINTED_CHARACTERS} characters")


_budget: ContextVar[_Budget | None] = ContextVar("template_budget", default=None)
_costly = threading.Lock()


@contextmanager
def template_budget() -> Iterator[None]:
    """Give what is rendered inside a fresh budget."""
    budget = _Budget(time.thread_time(), MAX_STEPS, MAX_PRINTED_CHARACTERS, SHORT_SECONDS)
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)
        if budget.is_costly:
            _costly.release()


# --- Counting ---------------------------------------------------------------------------------


def count_round() -> None:
    """Take one step from the budget, if there is one: constants are computed when a template is compiled."""
    budget = _budget.get()
    if budget is not None:
        budget.step()


def count_text(num_characters: int) -> str:
    """Take printed text from the budget; returns nothing to print."""
    budget = _budget.get()
    if budget is not None:
        budget.print(num_characters)
    return ""


def count_printed(value: Any) -> Any:
    """The text of a printed value, taken from the budget."""
    text = value if isinstance(value, str) else str(value)
    count_text(len(text))
    return text


# --- Bounds -----------------------------------------------------------------------------------


def _bounded(num_characters: int) -> None:
    if num_characters > MAX_OUTPUT_CHARACTERS:
        raise TemplateLimitError(f"it makes a text of {num_characters} characters, more than {MAX_OUTPUT_CHARACTERS}")


def _check_width(width: Any) -> None:
    if isinstance(width, int) and abs(width) > _MAX_WIDTH:
        raise TemplateLimitError(f"it asks for a width of {width}, more than {_MAX_WIDTH}")


def _check_format(template: str) -> None:
    if _WIDE_FIELD.search(template):
        raise TemplateLimitError(f"it formats with a field of unknown width or one above 9999: {template[:40]!r}")
    _bounded(len(template))


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitError if the result of `left operator right` would be too large."""
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        _bounded(len(left) + len(right))
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        _check_list_len(len(left) + len(right))
    elif operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str) and isinstance(count, int):
                _bounded(len(value) * count)
            elif isinstance(value, list | tuple) and isinstance(count, int):
                _check_list_len(len(value) * count)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INTEGER_BITS:
            raise TemplateLimitError(f"it computes an integer of {bits} bits, more than {_MAX_INTEGER_BITS}")


def _check_list_len(num_items: int) -> None:
    if num_items > _MAX_LIST_LEN:
        raise TemplateLimitError(f"it makes a list of {num_items} items, more than {_MAX_LIST_LEN}")


def check_method(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check a call of a method of `text` that can enlarge it; return the arguments to call it with."""
    if name in ("center", "ljust", "rjust", "zfill"):
        for argument in args:
            _check_width(argument)
    elif name == "replace" and len(args) >= 2:
        _check_replacement(text, args[0], args[1])
    elif name in ("format", "format_map"):
        _check_format(text)
    elif name == "join" and args:
        parts = list(args[0])
        _bounded(sum(len(part) + len(text) for part in parts if isinstance(part, str)))
        return (parts,)
    return args


def _check_replacement(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _bounded(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def concatenate(*parts: Any) -> str:
    """Jinja2's `~`."""
    texts = [str(part) for part in parts]
    _bounded(sum(map(len, texts)))
    return "".join(texts)


# --- Filters ----------------------------------------------------------------------------------


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja2's own filter, which escapes <, > and & for HTML.
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _MAX_JSON_INDENT:
        raise TemplateLimitError(f"it indents JSON by {width}, more than {_MAX_JSON_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _join(context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    if attribute is None:
        _bounded(sum(len(item if isinstance(item, str) else str(item)) + len(str(d)) for item in items))
    joined: str = FILTERS["join"](context, items, d, attribute)
    return joined


_join.jinja_pass_arg = FILTERS["join"].jinja_pass_arg  # type: ignore[attr-defined]


def _checked(name: str, check: Callable[..., None]) -> Callable[..., Any]:
    """Jinja2's filter `name`, with its arguments checked first."""
    original = FILTERS[name]
    passes_context = hasattr(original, "jinja_pass_arg")

    def bounded(*args: Any, **kwargs: Any) -> Any:
        check(*args[passes_context:], **kwargs)
        return original(*args, **kwargs)

    if passes_context:
        bounded.jinja_pass_arg = original.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


def _check_center(_text: str, width: int = 80) -> None:
    _check_width(width)


def _check_indent(text: str, width: int | str = 4, first: object = None, blank: object = None) -> None:
    width_len = width if isinstance(width, int) else len(width)
    _check_width(width_len)
    _bounded(len(text) + (text.count("\n") + 1) * width_len)


def _check_replace_filter(text: str, old: str, new: str, count: int | None = None) -> None:
    _check_replacement(str(text), old, new)


def _check_format_filter(template: str, *_args: Any, **_kwargs: Any) -> None:
    _check_format(str(template))


BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    "tojson": _tojson,
    "join": _join,
    "center": _checked("center", _check_center),
    "indent": _checked("indent", _check_indent),
    "replace": _checked("replace", _check_replace_filter),
    "format": _checked("format", _check_format_filter),
}
"""Replacements for filters of Jinja2, by name."""
