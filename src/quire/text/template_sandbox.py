"""Jinja2 environment of chat templates: a sandbox with limits of time and size.

A template is chosen by the operator, and often downloaded with a model. Jinja2's immutable sandbox keeps it from
reaching Python; this module ends a template that runs or writes without end. Templates have the same additions as in
Hugging Face Transformers: `raise_exception`, `strftime_now`, its `tojson`, `break` and `continue`, and the
`generation` block. Must not know: messages, tokenizers. Next to read: `chat_template.py`.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 4 * 2**20
"""Most characters of a rendered chat, and of a text or list that `+` or `*` makes."""
MAX_SECONDS = 0.25
"""Processor time of a rendering, so that a busy machine fails none. 2,048 messages take 0.03 s, measured."""
_MAX_INTEGER_BITS = 4096
_STEPS_PER_CLOCK_CHECK = 16
"""Reading the clock of a thread is a system call."""


class TemplateLimitError(jinja2.TemplateError):
    """The template takes too much time, or makes a value that is too large."""


class TemplateRefusalError(jinja2.TemplateError):
    """The template called `raise_exception`: the model does not support these messages."""


class _Stopwatch:
    """Processor time of one rendering."""

    def __init__(self) -> None:
        self._start_s = time.thread_time()
        self._num_steps = 0

    def count_step(self) -> None:
        """Count one loop iteration or call. Raises: TemplateLimitError."""
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_CLOCK_CHECK == 0 and time.thread_time() - self._start_s > MAX_SECONDS:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} s of processor time")


_stopwatch: ContextVar[_Stopwatch | None] = ContextVar("stopwatch", default=None)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates in which every loop iteration and call checks the time of the rendering."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"])
        self.next_iteration = _next_iteration
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile `source`. Raises: jinja2.TemplateSyntaxError and what Python's compiler raises."""
        return self.from_string(_CountIterations().visit(self.parse(source)))

    def free_variables(self, source: str) -> list[str]:
        """Return the names that a template may read from outside."""
        return sorted(meta.find_undeclared_variables(self.parse(source)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, unless its result would be too large."""
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj`; the names of the parameters leave all others to the template."""
        stopwatch = _stopwatch.get()
        if stopwatch is not None:  # constants are computed when a template is compiled
            stopwatch.count_step()
        return super().call(__context, __obj, *args, **kwargs)


def render(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    """Run a compiled template. Raises: TemplateLimitError, TemplateRefusalError, anything a template can raise."""
    token = _stopwatch.set(_Stopwatch())
    try:
        return "".join(_limited(template.generate(values)))
    finally:
        _stopwatch.reset(token)


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > MAX_CHARACTERS:
            raise TemplateLimitError(f"it writes more than {MAX_CHARACTERS} characters; send shorter messages")
        yield piece


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it prints its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _CountIterations(NodeTransformer):
    """Adds a call of `next_iteration` to each loop of a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("next_iteration"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node


def _next_iteration() -> None:
    """Count an iteration: `TemplateEnvironment.call` counts every call."""


def _check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse what one operator could compute for hours or fill the memory with, where no clock is checked."""
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if num_bits > _MAX_INTEGER_BITS:
            raise TemplateLimitError(f"it computes an integer of {num_bits} bits, more than {_MAX_INTEGER_BITS}")
    sizes = [len(value) if isinstance(value, str | list | tuple) else value for value in (left, right)]
    if sizes != [left, right] and all(isinstance(size, int) for size in sizes):
        size = sizes[0] * sizes[1] if operator == "*" else sum(sizes)
        if size > MAX_CHARACTERS:
            raise TemplateLimitError(f"it makes a value of {size} characters or items, more than {MAX_CHARACTERS}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja2's own filter, which escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusalError(message)


def _strftime_now(time_format: str) -> str:
    return datetime.now().strftime(time_format)
