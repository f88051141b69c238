"""The Jinja2 environment of chat templates: no way out, and no way to use up time or memory.

A template comes with a model or with a request, so it is not trusted. Jinja2's immutable sandbox keeps it from
reaching Python; this file puts the checks of `template_bounds.py` into it. Templates have what Hugging Face gives
them: `raise_exception`, `strftime_now`, its `tojson`, `break` and `continue`, and the `generation` block.
Must not know: messages, tokenizers. Next to read: `template_bounds.py`.
"""

from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from quire.text.template_bounds import (
    BOUNDED_FILTERS,
    check_method,
    check_operator,
    concatenate,
    count_printed,
    count_round,
    count_text,
)

_REMOVED_FILTERS = ("urlize", "wordwrap", "xmlattr", "pprint", "random")
_UNBOUNDED_METHODS = frozenset({"expandtabs", "translate"})


class TemplateRefusalError(jinja2.TemplateError):
    """The template called `raise_exception`: these messages are not for this model."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates so that their loops, calls, operators and prints draw on the budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"])
        self.finalize = count_printed
        self.concatenate = concatenate
        self.count_text = count_text
        self.next_round = _next_round
        self.filters.update(BOUNDED_FILTERS)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile `source`. Raises: jinja2.TemplateSyntaxError and what Python's compiler raises."""
        return self.from_string(_Instrument().visit(self.parse(source)))

    def loops_over_content(self, source: str) -> bool:
        """Whether the template has a loop over the parts of a message's content."""
        for loop in self.parse(source).find_all(nodes.For):
            iterated: nodes.Node | None = loop.iter
            while isinstance(iterated, nodes.Filter):
                iterated = iterated.node
            if isinstance(iterated, nodes.Getattr) and iterated.attr == "content":
                return True
            if isinstance(iterated, nodes.Name) and iterated.name == "content":
                return True
            key = iterated.arg if isinstance(iterated, nodes.Getitem) else None
            if isinstance(key, nodes.Const) and key.value == "content":
                return True
        return False

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be much larger than its operands."""
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read this attribute."""
        if isinstance(obj, str) and attr in _UNBOUNDED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj`; the parameters' names leave all others to the template."""
        count_round()
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = check_method(owner, getattr(method, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; for inference it prints its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Instrument(NodeTransformer):
    """Adds the counting to a parsed template."""

    def __init__(self) -> None:
        self._buffer_depth = 0

    def visit_For(self, node: nodes.For) -> nodes.Node:
        buffers = node.recursive
        self._buffer_depth += buffers
        self.generic_visit(node)
        self._buffer_depth -= buffers
        node.body.insert(0, nodes.ExprStmt(_environment_call("next_round", []), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("concatenate", node.nodes).set_lineno(node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        # Text printed at the top is counted as it comes out; into a buffer it could be repeated without end.
        self.generic_visit(node)
        num_characters = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        if self._buffer_depth and num_characters:
            node.nodes.insert(0, _environment_call("count_text", [nodes.Const(num_characters)]))
        return node

    def _visit_buffered(self, node: nodes.Node) -> nodes.Node:
        self._buffer_depth += 1
        self.generic_visit(node)
        self._buffer_depth -= 1
        return node

    visit_Macro = visit_AssignBlock = visit_FilterBlock = visit_CallBlock = _visit_buffered


def _environment_call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _next_round() -> None:
    """Called once a loop round; `BoundedEnvironment.call` counts it like any call."""


def _raise_exception(message: str) -> None:
    raise TemplateRefusalError(message)


def _strftime_now(time_format: str) -> str:
    return datetime.now().strftime(time_format[:200])
