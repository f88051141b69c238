"""Filters, tests, methods and operators of chat templates, each with an estimate of its result.

What is in no table here does not exist for a template: `groupby`, `lipsum`, `pprint`, `striptags`, `urlencode`,
`urlize`, `wordwrap` and `xmlattr`, which no published template uses and whose time is hard to bound. There is no HTML:
`safe` changes nothing. Must not know: the environment, messages. Next to read: `template_sandbox.py`.
"""

import functools
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2.filters
import jinja2.tests
from jinja2.exceptions import FilterArgumentError, SecurityError
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import pass_environment

from quire.text.template_budget import ITEM_SIZE, MAX_CHARACTERS, MAX_SIZE, Budget, TemplateLimitError, current

Estimate = Callable[..., int]
"""From the arguments of a call to the size of its result, or to the characters that can be made in its time."""
_PIECE_SIZE = 64
"""Memory of a short text in a list."""
_COMPARED_PER_CHARACTER = 16
"""Comparisons of a search in the time in which a character is made, or less."""
_MAX_WIDTH = 999
"""Largest width or precision of a format, indentation, or length of a separator."""
_MAX_NUMBER_LEN = 1000
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_BLANKS = "".join(filter(str.isspace, map(chr, range(0x3001))))
_LARGE_COMPARISON = 8
"""Steps that a comparison of lists or texts counts as."""


# --- Estimates ------------------------------------------------------------------------------


def _small(*_: Any, **__: Any) -> int:
    return 0


def _same(text: str, *_: Any) -> int:
    return len(text)


def _cased(text: str) -> int:
    return len(text) if text.isascii() else 3 * len(text)


def _padded(text: str, width: int, *_: Any) -> int:
    return max(len(text), width)


def _searched(text: str, part: Any = None, *_: Any) -> int:
    """Of searches that compare each character of a text with each one of a part."""
    num_compared = len(text) * len(part) if isinstance(part, str) else 0
    return max(len(text), num_compared // _COMPARED_PER_CHARACTER)


def _split(text: str, part: str | None = None, maxsplit: int = -1) -> int:
    num_places = _count(text, _BLANKS) if part is None else text.count(part)
    return _searched(text, part) + _PIECE_SIZE * (num_places if maxsplit < 0 else min(num_places, maxsplit))


def _lines(text: str, *_: Any) -> int:
    return len(text) + _PIECE_SIZE * _count(text, _LINE_ENDS)


def _expanded(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * max(tabsize, 0)


def _replaced(text: str, old: str, new: str, count: int = -1) -> int:
    num_places = text.count(old) if count < 0 else min(text.count(old), count)
    return len(text) + num_places * max(len(new) - len(old), 0)


def _indented(text: str, width: int | str = 4, *_: Any, **__: Any) -> int:
    width = len(width) if isinstance(width, str) else operator.index(width)
    return _lines(text) + width * (1 + _count(text, _LINE_ENDS))


def _shortened(text: str, length: int = 255, killwords: bool = False, end: str = "...", *_: Any, **__: Any) -> int:
    return len(text) + len(end)


def _words(text: str) -> int:
    return _PIECE_SIZE * len(text)


def _items(values: Any, *_: Any) -> int:
    return ITEM_SIZE * len(values)


def _named(values: Any, name: Any = "", *_: Any, attribute: Any = "", **__: Any) -> int:
    """Of filters that call another one by its name, or read an attribute of each item."""
    return max(len(text) * _MAX_WIDTH if isinstance(text, str) else 0 for text in (name, attribute))


def _rows(values: Any, num_rows: int, *_: Any, **__: Any) -> int:
    return ITEM_SIZE * operator.index(num_rows)


def _formatted(text: str, values: Any) -> int:
    """Of Python's `%`."""
    size = current().size
    num_places = text.count("%")
    if isinstance(values, Mapping):
        filled = num_places * max(map(size, values.values()), default=0)
    else:
        filled = sum(map(size, values)) if isinstance(values, tuple) else size(values)
    if (most := len(text) + num_places * _MAX_WIDTH + filled) <= MAX_CHARACTERS:
        for place in text.replace("%%", "").split("%")[1:]:
            spec = place.partition(")")[2] if place.startswith("(") else place
            _check_width(spec[: len(spec) - len(spec.lstrip("#- +.*0123456789"))])
    return most


def _count(text: str, characters: str) -> int:
    return sum(map(text.count, characters))


def _check_width(spec: str) -> None:
    """Refuse a long width or precision, and one that is a value. `spec`: of a format, between `%` and letter."""
    numbers = "".join(character if character.isdecimal() else " " for character in spec[:_MAX_WIDTH]).split()
    if len(spec) > _MAX_WIDTH or "*" in spec or any(len(number) > len(str(_MAX_WIDTH)) for number in numbers):
        raise TemplateLimitError(f"it formats with a width of more than {_MAX_WIDTH}")


# --- Operators ------------------------------------------------------------------------------

OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod,
}  # fmt: skip
"""Operators whose result may be larger than what they are given."""


def operate(name: str, left: Any, right: Any) -> Any:
    """Apply one of `OPERATORS`."""
    budget = current()
    if type(left) is str and type(right) is str and name == "+":
        budget.admit(len(left) + len(right))
        return budget.keep(left + right)
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * abs(right) if name == "**" else left.bit_length() + right.bit_length()
        budget.admit_integer(num_bits)
    elif name == "%" and isinstance(left, str):
        budget.admit(_formatted(left, right))
    elif name == "+":
        budget.admit(budget.size(left) + budget.size(right), MAX_SIZE)
    elif name == "*":
        number, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(number, int):
            budget.admit(number * budget.size(value), MAX_CHARACTERS if isinstance(value, str) else MAX_SIZE)
    return budget.keep(OPERATORS[name](left, right))


def joined(*values: Any) -> str:
    """Return the texts of values as one text: the operator `~`."""
    budget = current()
    return budget.concatenated("", [value if type(value) is str else budget.text(value) for value in values])


def compared(result: Any) -> Any:
    """Count a comparison of values that may be large, and return its result."""
    current().step(_LARGE_COMPARISON)
    return result


# --- Methods --------------------------------------------------------------------------------

METHODS: Mapping[type, Mapping[str, Estimate]] = {
    str: {
        **dict.fromkeys(
            ("count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower",
             "isnumeric", "isprintable", "isspace", "istitle", "isupper", "partition", "removeprefix", "removesuffix",
             "startswith"), _same,
        ),
        **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), _cased),
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
        **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"), _searched),
        "split": _split, "rsplit": _split, "splitlines": _lines, "expandtabs": _expanded, "replace": _replaced,
    },
    list: {"copy": _items, "count": _items, "index": _items},
    tuple: {"count": _items, "index": _items},
    dict: {"copy": _items, "get": _small, "items": _small, "keys": _small, "values": _small},
}  # fmt: skip
"""Methods of built-in types, beside `join`, `format` and `format_map` of texts."""


def call_method(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a bound method of a built-in type. Raises: SecurityError for one that is in no table."""
    of, name, budget = method.__self__, method.__name__, current()
    if type(of) is str and name == "join":
        return budget.concatenated(of, *map(budget.listed, args), **kwargs)
    estimate = METHODS.get(type(of), {}).get(name)
    if estimate is None:
        raise SecurityError(f"the method '{name}' of a {type(of).__name__} cannot be called")
    budget.admit(estimate(of, *args, **kwargs))
    return budget.keep(method(*args, **kwargs))


class SizedFormatter(SandboxedFormatter):
    """`format` of texts: limits widths and the whole text."""

    _num_characters = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Apply `!r`, `!s` or `!a`."""
        current().admit(4 * current().size(value) if conversion else 0)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the text of one field."""
        _check_width(format_spec)
        text = format(value, format_spec) if format_spec else current().text(value)
        self._num_characters += len(text)
        current().admit(self._num_characters)
        return text


# --- Filters --------------------------------------------------------------------------------


def _sized(
    function: Callable[..., Any],
    estimate: Estimate = _small,
    *,
    takes: Callable[[Budget, Any], Any] = lambda _, value: value,
    is_lazy: bool = False,
) -> Callable[..., Any]:
    """Return a filter of Jinja2 with limits. `takes`: converts its value. `is_lazy`: its result is an iterator."""
    num_hidden = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        given = [takes(budget, args[num_hidden]), *args[num_hidden + 1 :]]
        budget.admit(estimate(*given, **kwargs))
        result = function(*args[:num_hidden], *given, **kwargs)
        return iter(budget.listed(result)) if is_lazy else budget.keep(result)

    return call


def _method(name: str, *defaults: Any) -> Callable[..., Any]:
    """Return a filter that calls a method of a text."""

    def call(value: Any, *args: Any) -> Any:
        return call_method(getattr(current().text(value), name), *args, *defaults[len(args) :])

    return call


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    text = current().text
    return call_method(text(value).replace, text(old), text(new), -1 if count is None else count)


def _escape(value: Any) -> str:
    text = current().text(value)
    current().admit(len(text) + 4 * _count(text, "<>&'\""))
    return str(current().keep(str(jinja2.filters.do_forceescape(text))))


def _format(value: Any, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise FilterArgumentError("the filter 'format' takes positional or named values, not both")
    return operate("%", current().text(value), kwargs or args)


@pass_environment
def _join(environment: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    budget = current()
    _, values = _keyed(environment, value, attribute)
    return budget.concatenated(budget.text(d), [budget.text(item) for item in values])


@pass_environment
def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    _, values = _keyed(environment, iterable, attribute)
    return functools.reduce(lambda total, item: operate("+", total, item), values, start)


@pass_environment
def _sort(
    environment: Any, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    items, keys = _keyed(environment, value, attribute, ignores_case=not case_sensitive)
    order = sorted(range(len(items)), key=keys.__getitem__, reverse=reverse)
    return list(current().keep([items[index] for index in order]))


@pass_environment
def _unique(environment: Any, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Iterator[Any]:
    found: dict[Any, Any] = {}
    for item, key in zip(*_keyed(environment, value, attribute, ignores_case=not case_sensitive), strict=True):
        found.setdefault(key, item)
        current().step()
    return iter(current().keep([*found.values()]))


def _extreme(choose: Callable[..., int]) -> Callable[..., Any]:
    """Return the filter `min` or `max`."""

    @pass_environment
    def call(environment: Any, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        items, keys = _keyed(environment, value, attribute, ignores_case=not case_sensitive)
        return items[choose(range(len(items)), key=keys.__getitem__)] if items else environment.undefined("no items")

    return call


def _keyed(environment: Any, value: Any, attribute: Any, *, ignores_case: bool = False) -> tuple[Any, Any]:
    """Return the items of a value, and by what they are compared."""
    budget = current()
    items = keys = budget.listed(value)
    if attribute is not None:
        budget.admit(_named(items, attribute))
        get = jinja2.filters.make_attrgetter(environment, attribute)
        keys = budget.keep([get(item) for item in items])
    if ignores_case:
        budget.admit(budget.size(keys), MAX_SIZE)
        keys = budget.keep([key.lower() if isinstance(key, str) else key for key in keys])
    return items, keys


def _reverse(value: Any) -> Any:
    budget = current()
    return budget.keep(value[::-1]) if isinstance(value, str) else iter(budget.keep([*reversed(budget.listed(value))]))


def _number(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of Jinja2 that reads a number."""

    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str) and len(value) > _MAX_NUMBER_LEN:
            raise TemplateLimitError(f"it reads a number of {len(value)} characters, more than {_MAX_NUMBER_LEN}")
        return current().keep(function(value, *args, **kwargs))

    return call


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if not isinstance(value, int | float) or abs(precision) > _MAX_WIDTH:
        raise TypeError(f"the filter 'round' takes a number and at most {_MAX_WIDTH} digits")
    return jinja2.filters.do_round(value, precision, method)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja2's own filter, which escapes <, > and & for HTML.
    budget = current()
    for part in (indent, *(separators or ())):
        if (len(part) if isinstance(part, str) else part or 0) > _MAX_WIDTH:
            raise TemplateLimitError(f"it writes JSON with an indentation or separator of more than {_MAX_WIDTH}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and budget.size(value) < MAX_CHARACTERS // 12:  # `\ud83d\ude00` is one character
        return str(budget.keep(encoder.encode(value)))
    return budget.joined(encoder.iterencode(value))


def _listed(budget: Budget, value: Any) -> Any:
    return budget.listed(value) if value else value  # filters take None for no items


_JINJA = jinja2.filters.FILTERS
_TEXT = Budget.text
FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: _JINJA[name] for name in ("abs", "attr", "count", "d", "default", "first", "last", "length", "random")},
    **{
        name: _sized(_JINJA[name], _named, takes=_listed, is_lazy=True)
        for name in ("map", "reject", "rejectattr", "select", "selectattr")
    },
    **{name: _sized(_JINJA[name], _rows, takes=_listed, is_lazy=True) for name in ("batch", "slice")},
    "dictsort": _sized(_JINJA["dictsort"], _items),
    "items": _sized(_JINJA["items"], is_lazy=True),
    **{name: _number(_JINJA[name]) for name in ("filesizeformat", "float", "int")},
    "indent": _sized(_JINJA["indent"], _indented, takes=_TEXT),
    "title": _sized(_JINJA["title"], _words, takes=_TEXT),
    "truncate": _sized(_JINJA["truncate"], _shortened, takes=_TEXT),
    "wordcount": _sized(_JINJA["wordcount"], _words, takes=_TEXT),
    **{name: _method(name) for name in ("capitalize", "lower", "upper")},
    "center": _method("center", 80),
    "trim": _method("strip", None),
    "replace": _replace,
    **dict.fromkeys(("e", "escape", "forceescape"), _escape),
    **dict.fromkeys(("safe", "string"), lambda value: current().text(value)),
    "format": _format,
    "join": _join,
    "list": lambda value: current().keep([*current().listed(value)]),
    "max": _extreme(max),
    "min": _extreme(min),
    "reverse": _reverse,
    "round": _round,
    "sort": _sort,
    "sum": _sum,
    "tojson": _tojson,
    "unique": _unique,
}


# --- Tests ----------------------------------------------------------------------------------


def _on_large(function: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *values: bool(compared(function(*values)))


_TESTS: Mapping[str, Any] = jinja2.tests.TESTS
_COMPARISONS = (
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne",
)  # fmt: skip
TESTS: Mapping[str, Callable[..., bool]] = {
    **{name: test for name, test in _TESTS.items() if name not in ("escaped", *_COMPARISONS)},
    **{name: _on_large(_TESTS[name]) for name in _COMPARISONS},
    "divisibleby": lambda value, number: operate("%", value, number) == 0,
    "even": lambda value: operate("%", value, 2) == 0,
    "odd": lambda value: operate("%", value, 2) == 1,
    "lower": lambda value: current().text(value).islower(),
    "upper": lambda value: current().text(value).isupper(),
}
