"""Jinja2 environment of chat templates: a sandbox with limits of time and size.

A template is chosen by the operator, and often downloaded with a model. Jinja2's immutable sandbox keeps it from
reaching Python; this module ends a template that runs or writes without end. Everything that a template computes is
computed while it renders, within a budget: nothing is folded when it is compiled. Templates have the same additions as
in Hugging Face Transformers: `raise_exception`, `strftime_now`, its `tojson`, `break` and `continue`, and the
`generation` block. Must not know: messages, tokenizers. Next to read: `template_budget.py`, `template_functions.py`.
"""

import io
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.text.template_budget import MAX_INTEGER_BITS, TemplateLimitError, current, new_budget
from quire.text.template_functions import (
    FILTERS,
    METHODS,
    OPERATORS,
    TESTS,
    SizedFormatter,
    call_method,
    compared,
    joined,
    operate,
)

_MAX_COMPARED = 8
"""Most values of one comparison such as `a < b < c`."""
_MAX_TIME_FORMAT_LEN = 100
_NODES_PER_STEP = 8
"""Nodes of a template that run in the time of a step."""
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOCALS = ("_loop_vars", "_block_vars")
"""Arguments that Jinja2 adds to calls, for functions that read the context: here are none."""


class TemplateRefusalError(jinja2.TemplateError):
    """The template called `raise_exception`: the model does not support these messages."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that count their work in the budget of the rendering."""

    intercepted_binops = frozenset(OPERATORS)
    compared = staticmethod(compared)
    joined = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=lambda value: value if type(value) is str else current().text(value),
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        self.filters, self.tests = dict(FILTERS), dict(TESTS)
        del self.globals["lipsum"]
        self.globals |= {
            "dict": _dict,
            "namespace": _namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def compile_template(self, source: str) -> "CompiledTemplate":
        """Compile `source`. Raises: jinja2.TemplateSyntaxError and what Python's compiler raises."""
        written = io.StringIO()
        generator = _CodeGenerator(self, None, None, written, optimized=False)
        generator.visit(_CountSteps().visit(self.parse(source)))
        code = compile(written.getvalue(), "<template>", "exec")
        template = jinja2.Template.from_code(self, code, self.make_globals(None))
        return CompiledTemplate(template, sorted(generator.free_variables))

    # --- Called by compiled templates -------------------------------------------------------

    def count_steps(self, num_steps: int) -> None:
        """Count an iteration of a loop, or the body of a macro."""
        current().step(num_steps)

    def made(self, value: Any) -> Any:
        """Count a list, tuple, object or part of a text."""
        return current().keep(value)

    def concat(self, pieces: Iterable[str]) -> str:
        """Return the text that a macro or block wrote."""
        return current().concatenated("", pieces) if isinstance(pieces, list) else current().joined(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, unless its result would be too large."""
        return operate(operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj`; the names of the parameters leave all others to the template."""
        for name in _LOCALS if kwargs else ():
            kwargs.pop(name, None)
        if type(__obj) is BuiltinMethodType:
            return call_method(__obj, *args, **kwargs)
        budget, is_macro = current(), type(__obj) is Macro
        budget.step()
        if not is_macro or __obj.catch_varargs or __obj.catch_kwargs:
            budget.keep([*args, *kwargs.values()])  # it may become a list
        return __obj(*args, **kwargs) if is_macro else super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`. Most are keys of objects, which Jinja2 looks for after an exception."""
        kind = type(obj)
        if attribute in METHODS.get(kind, ()):
            return getattr(obj, attribute)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return `obj[argument]`."""
        if type(argument) is str:
            if type(obj) is dict and argument in obj:
                return obj[argument]
            current().step(1 + len(argument) // 4096)  # Python interns names of attributes
        elif type(argument) is tuple:
            compared(None)  # Python hashes every item in it
        elif type(obj) is str:
            current().step()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        """Return a replacement for the methods `format` and `format_map` of texts; None for another value."""
        if type(value) is not BuiltinMethodType or type(text := value.__self__) is not str:
            return None
        if value.__name__ == "format":
            return lambda *args, **kwargs: current().keep(SizedFormatter(self).vformat(text, args, kwargs))
        if value.__name__ == "format_map":
            return lambda values: current().keep(SizedFormatter(self).vformat(text, (), values))
        return None

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the error as it is. Jinja2 would build a traceback, which takes seconds for a deep recursion."""
        raise


class CompiledTemplate:
    """A template that can be rendered. `free_variables`: the names that it may read from outside, sorted."""

    def __init__(self, template: jinja2.Template, free_variables: list[str]) -> None:
        self._template, self.free_variables = template, free_variables

    def render(self, values: Mapping[str, Any]) -> str:
        """Run the template. Raises: TemplateLimitError, TemplateRefusalError, anything a template can raise."""
        with new_budget() as budget:
            return budget.joined(self._template.generate(values))


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it prints its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _CountSteps(NodeTransformer):
    """Adds a call of `count_steps` to each loop, its condition, and each long macro and block of a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.Or(_count(_num_steps([node.test])), node.test)
        node.body.insert(0, nodes.ExprStmt(_count(_num_steps(node.body)), lineno=node.lineno))
        return node

    def _count_body(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_count(_num_steps(node.body)), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _count_body


def _num_steps(body: list[nodes.Node]) -> int:
    return 1 + sum(1 for node in body for _ in node.find_all(nodes.Node)) // _NODES_PER_STEP


def _count(num_steps: int) -> nodes.Expr:
    # Written to the code as it is, without the detour by `call`.
    return nodes.EnvironmentAttribute(f"count_steps({num_steps})")


class _CodeGenerator(CodeGenerator):
    """Writes a template's Python, in which lists, `~`, slices and comparisons are counted and nothing is folded."""

    free_variables: set[str]

    def enter_frame(self, frame: Frame) -> None:
        super().enter_frame(frame)
        for action, name in frame.symbols.loads.values():
            if action == "resolve" and name not in self.environment.globals:
                self.free_variables.add(name)

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        self.free_variables = set()
        super().visit_Template(node, frame)

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, int) and node.value.bit_length() > MAX_INTEGER_BITS:
            self.fail(f"an integer has more than {MAX_INTEGER_BITS} bits", node.lineno)
        super().visit_Const(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._counted(node, super().visit_List, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self._counted(node, super().visit_Tuple, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._counted(node, super().visit_Dict, frame)

    def _counted(self, node: Any, visit: Any, frame: Frame) -> None:
        if getattr(node, "ctx", "load") == "store" or all(isinstance(item, nodes.Const) for item in node.items):
            visit(node, frame)
        else:
            self.write("environment.made(")
            visit(node, frame)
            self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.made(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        if len(node.ops) > _MAX_COMPARED:
            self.fail(f"a comparison of more than {_MAX_COMPARED} values", node.lineno)
        is_short = len(node.ops) == 1 and node.ops[0].op in ("eq", "ne")
        if is_short and any(isinstance(value, nodes.Const) for value in (node.expr, node.ops[0].expr)):
            super().visit_Compare(node, frame)
        else:
            self.write("environment.compared(")
            super().visit_Compare(node, frame)
            self.write(")")

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        self.fail("there is no autoescape: the text of a chat is not HTML", node.lineno)

    visit_ScopedEvalContextModifier = visit_EvalContextModifier

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.Const | nodes.TemplateData):
            raise nodes.Impossible
        return str(node.as_const(frame.eval_ctx))


class _Namespace(Namespace):
    """A namespace that does not print its values, which may be each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _namespace(*values: Mapping[str, Any], **names: Any) -> _Namespace:
    return _Namespace(_dict(*values, **names))


def _dict(*values: Mapping[str, Any], **names: Any) -> dict[str, Any]:
    """Return an object of names, and of another object. A list of pairs could have a million keys of one hash."""
    if not all(isinstance(value, dict) for value in values):
        raise TypeError("'dict' and 'namespace' take an object, or names with values")
    made: dict[str, Any] = current().keep(dict(*values, **names))
    return made


def _raise_exception(message: str) -> None:
    raise TemplateRefusalError(message)


def _strftime_now(time_format: str) -> str:
    if len(time_format) > _MAX_TIME_FORMAT_LEN:
        raise TemplateLimitError(f"it formats the time with {len(time_format)} characters")
    return datetime.now().strftime(time_format)
