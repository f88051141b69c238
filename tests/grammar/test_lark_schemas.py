import json
from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.grammar.compiler import GrammarCompiler, check_form
from quire.grammar.lark_schemas import unenforceable_inside
from quire.structured_outputs import StructuredOutputsParams
from tests.grammar.builders import accepts, make_vocabulary

WIDE = '{"type": "object", "minProperties": 3, "required": ["a"]}'
NARROW = '{"type": "object", "minProperties": 1}'


def check(grammar: str) -> None:
    check_form(StructuredOutputsParams(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "line"),
    [
        (f"start: %json {WIDE}", 1),
        (f'start: "a" (%json {WIDE})+', 1),
        (f"start: %json{WIDE}", 1),
        (f"start: one | two\none: %json {NARROW}\ntwo: %json {WIDE}\n", 3),
        (f"// %json {NARROW}\nstart: %json\n\n{WIDE} // end", 2),
        ('start: %json {"items": {"anyOf": [{"type": "null"}, ' + WIDE + "]}}", 1),
        ('start: "%json \\" /" /"/ %json ' + WIDE, 1),
        (f"start: /[^x\n]\\//\n  | %json {WIDE}", 3),
        ('%llguidance {"no_forcing": true}\nstart: %json ' + WIDE, 2),
        ('start: %regex {"substring_chars": "%json \\"/"} | %json ' + WIDE, 1),
        ("start: %json " + WIDE.replace("min", "\\u006din"), 1),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_with_its_line(grammar: str, line: int) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        check(grammar)
    assert caught.value.field == "structured_outputs.grammar"
    assert f"the %json in line {line}: minProperties may be at most 1 here" in str(caught.value)


def test_a_schema_without_end_is_refused() -> None:
    endless = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d"}], "$defs": {"d": {"$ref": "#/$defs/d"}}}
    check('start: "a" | %json {"type": "null"}')
    with pytest.raises(InvalidParameterError, match="in line 2: no JSON of finite length"):
        check(f'start: "a"\n | %json {json.dumps(endless)}')


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a"',
        f"start: %json {NARROW}",
        f"start: one two\none: %json {NARROW}\ntwo: %json true",
        f'start: "%json {{" // %json {WIDE}',
        f'# %json {WIDE}\nstart: "a"',
        'start: %regex {"substring_chars": "%json 1"}',
        'start: /%json "/ %json {"const": "%json {"}',
        'root ::= "%json {" [a-z]',
    ],
)
def test_what_can_be_kept_passes_and_what_only_looks_like_a_schema(grammar: str) -> None:
    check(grammar)


def test_what_cannot_be_read_is_refused() -> None:
    assert "cannot be read here" in str(unenforceable_inside('start: %json {"maximum": ' + "9" * 5000 + "}"))


def test_the_limit_is_tighter_since_a_name_may_be_spelled_twice() -> None:
    schema: dict[str, Any] = {"type": "object", "required": ["a"], "minProperties": 2}
    twice = '{"a":1,"\\u0061":2}'
    compiler = GrammarCompiler(make_vocabulary)
    assert not accepts(compiler.compile(StructuredOutputsParams(json=schema)).start(), twice)
    with pytest.raises(InvalidParameterError, match="at most 1 here, as many as"):
        check(f"start: %json {json.dumps(schema)}")
    schema["minProperties"] = 1
    grammar = compiler.compile(StructuredOutputsParams(grammar=f"start: %json {json.dumps(schema)}"))
    assert accepts(grammar.start(), twice), "why the limit is tighter"
