"""`StructuredOutputsParams`: the constraint that a generated text must follow. A field of `SamplingParams`.

With a `ReasoningSpan` the constraint begins after the reasoning, whose length may be limited. The other names are
vLLM's. Construction checks kind, sizes and depth; the grammar itself is compiled and checked when the request is added.
No tensors here, and no grammar library.
Next to read: `grammar/compiler.py`.
"""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from quire.errors import InvalidParameterError

MAX_TEXT_BYTES = 64 << 10
"""Largest schema, regex or grammar, and total of all choices."""
MAX_CHOICES = 1000
MAX_SCHEMA_DEPTH = 64
STRUCTURED_OUTPUTS_FAILED = "structured_outputs_failed"
"""`error_code` of an output that ended because its grammar allowed no next token."""
Kind = Literal["json", "json_object", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class ReasoningSpan:
    """Reasoning at the beginning of a text, between two markers. No constraint applies to it.

    Fields:
        start, end: texts of the markers; `start` may be empty if `is_open`.
        is_open: True if the prompt ends inside the reasoning. Otherwise the text begins with `start`, or directly with
            the answer.
        budget: most tokens of reasoning, after which the end is forced; None: no limit.
        closing: text that is forced then: some last words, `end`, and what the template has behind it. Empty: `end`.
        opening: text that is forced before a constrained answer, such as a marker.

    Raises: InvalidParameterError.
    """

    start: str
    end: str
    is_open: bool
    budget: int | None = None
    closing: str = ""
    opening: str = ""

    def __post_init__(self) -> None:
        for name in ("end",) if self.is_open and self.start == "" else ("start", "end"):
            _check_text(f"reasoning.{name}", getattr(self, name))
            if not getattr(self, name).strip():
                raise InvalidParameterError(_path(f"reasoning.{name}"), getattr(self, name), "more than white space")
        if not isinstance(self.is_open, bool):
            raise InvalidParameterError(_path("reasoning.is_open"), self.is_open, "true or false")
        budget = self.budget
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
            raise InvalidParameterError(_path("reasoning.budget"), budget, "a number of tokens, 0 or more, or left out")
        if not isinstance(self.closing, str) or self.closing:
            _check_text("reasoning.closing", self.closing)
            if self.end not in self.closing:
                raise InvalidParameterError(_path("reasoning.closing"), self.closing, f"a text with {self.end!r} in it")
        if not isinstance(self.opening, str) or self.opening:
            _check_text("reasoning.opening", self.opening)

    @property
    def closing_text(self) -> str:
        """Text that is forced at the budget."""
        return self.closing or self.end


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint of a text: exactly one of the first five fields; with `reasoning`, at most one.

    Fields:
        json: a JSON Schema, as a mapping or as JSON text; kept as text.
        json_object: True: any JSON object.
        regex: the whole text matches it (the syntax of Rust's regex, without look-around and back-references).
        choice: the text is one of these, at most 1,000.
        grammar: Lark as llguidance extends it, or GBNF.
        disable_any_whitespace: JSON without whitespace between its parts.
        whitespace_pattern: a regex for the whitespace between the parts of JSON. Default: a space, or one or two line
            breaks and up to 20 spaces or tabs, so that a model cannot write whitespace up to `max_tokens`.
        reasoning: a `ReasoningSpan`, or a mapping of its fields. The constraint begins after it; without a constraint
            the text after it is free.

    Schema, regex and grammar have at most 64 KiB, a schema at most 64 levels.
    Raises: InvalidParameterError.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    reasoning: ReasoningSpan | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reasoning", _reasoning(self.reasoning))
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) > 1 or (not given and self.reasoning is None):
            names = ", ".join(KINDS)
            raise InvalidParameterError("structured_outputs", given, f"given exactly one of {names}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.json_object is not None and self.json_object is not True:
            raise InvalidParameterError(_path("json_object"), self.json_object, "true, or left out")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        self._check_whitespace()

    def _check_whitespace(self) -> None:
        if not isinstance(self.disable_any_whitespace, bool):
            raise InvalidParameterError(_path("disable_any_whitespace"), self.disable_any_whitespace, "true or false")
        if self.whitespace_pattern is None and not self.disable_any_whitespace:
            return
        if self.kind not in ("json", "json_object"):
            name = "whitespace_pattern" if self.whitespace_pattern is not None else "disable_any_whitespace"
            raise InvalidParameterError(
                _path(name), getattr(self, name), "left out unless json or json_object is given"
            )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            limit = "left out with disable_any_whitespace=True"
            raise InvalidParameterError(_path("whitespace_pattern"), self.whitespace_pattern, limit)

    @property
    def constraint(self) -> "StructuredOutputsParams | None":
        """The same without `reasoning`; None if there is no more."""
        if self.reasoning is None:
            return self
        if self.kind is None:
            return None
        found = copy(self)  # without the checks of a new one
        object.__setattr__(found, "reasoning", None)
        return found

    @property
    def kind(self) -> Kind | None:
        """Name of the given field of the five; None if there is only `reasoning`."""
        return next((name for name in KINDS if getattr(self, name) is not None), None)

    @property
    def text(self) -> str:
        """The given field as text: equal `kind`, whitespace fields and `text` mean the same constraint."""
        if self.kind == "json_object":
            return '{"type":"object"}'
        if self.choice is not None:
            return json.dumps(list(self.choice), ensure_ascii=False)
        text: str = "" if self.kind is None else getattr(self, self.kind)
        return text


def _reasoning(span: Any) -> ReasoningSpan | None:
    """Return a span from a `ReasoningSpan` or a mapping of its fields. Raises: InvalidParameterError."""
    if isinstance(span, Mapping):
        names = [item.name for item in fields(ReasoningSpan)]
        if not {"start", "end", "is_open"} <= span.keys() <= set(names):
            limit = f"an object with start, end and is_open, and perhaps {' and '.join(names[3:])}"
            raise InvalidParameterError(_path("reasoning"), dict(span), limit)
        return ReasoningSpan(**span)
    if span is not None and not isinstance(span, ReasoningSpan):
        raise InvalidParameterError(_path("reasoning"), span, "a ReasoningSpan")
    return span


def _path(name: str) -> str:
    return f"structured_outputs.{name}"


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidParameterError(_path(name), text, "a non-empty string")
    _check_size(name, text, text)


def _check_size(name: str, text: str, shown: Any) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidParameterError(_path(name), shown, "valid Unicode text, without lone surrogates") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise InvalidParameterError(_path(name), f"{num_bytes} bytes", f"at most {MAX_TEXT_BYTES} bytes")


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence) or not choices:
        raise InvalidParameterError(_path("choice"), choices, "a non-empty list of strings")
    if len(choices) > MAX_CHOICES:
        raise InvalidParameterError(_path("choice"), f"{len(choices)} strings", f"at most {MAX_CHOICES} strings")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidParameterError(_path("choice"), choice, "a list of non-empty strings")
    _check_size("choice", "".join(choices), choices)
    return tuple(dict.fromkeys(choices))


def _schema_text(schema: Any) -> str:
    """Return a schema as compact JSON with its keys in order: properties are generated in this order."""
    too_deep = f"nested at most {MAX_SCHEMA_DEPTH} levels deep"
    if isinstance(schema, str):
        _check_text("json", schema)
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping):
            raise InvalidParameterError(_path("json"), schema, "a JSON Schema: a JSON object")
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        _check_size("json", text, schema)
        if _depth(parsed) > MAX_SCHEMA_DEPTH:
            raise InvalidParameterError(_path("json"), schema, too_deep)
    except RecursionError:
        # Python cannot write a value that deep either.
        shown = schema if isinstance(schema, str) else type(schema).__name__
        raise InvalidParameterError(_path("json"), shown, too_deep) from None
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(_path("json"), schema, f"a schema of JSON values ({error})") from None
    return text


def _depth(value: Any) -> int:
    """Return the levels of objects and lists within each other."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)
