"""Hostile grammars: each is compiled or refused with a reason in time, and the next one is answered."""

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.errors import InvalidParameterError, QueueFullError
from quire.grammar.check_process import CheckProcess, Refused, shared_check_process
from quire.structured_outputs import StructuredOutputsParams

Form = StructuredOutputsParams
GOOD = Form(regex="ab+")
ENDLESS = Form(grammar="start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(30)))
"""A product of automata that no limit of the library stops."""


def lark(*lines: str) -> dict[str, str]:
    return {"grammar": "\n".join(lines)}


def fan(depth: int, width: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {f"p{j}": {"$ref": f"#/$defs/d{i + 1}"} for j in range(width)}}
        for i in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def repeated(keyword: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    for _ in range(depth):
        schema = {keyword: [schema, schema]}
    return schema


SCHEMAS: dict[str, dict[str, Any]] = {
    "enum of 5,000": {"enum": [f"value{i}" for i in range(5000)]},
    "enum of 10,000 numbers": {"enum": list(range(10_000))},
    "maxLength": {"type": "string", "maxLength": 10**6},
    "minLength": {"type": "string", "minLength": 10**9},
    "minItems": {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
    "maxItems": {"type": "array", "items": {"type": "string"}, "maxItems": 10**6},
    "nested arrays": {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000}},
    "reference to itself": {"$ref": "#"},
    "references in a ring": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "tree": {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}},
    "fan": fan(20, 20),
    "product of anyOf": {
        "allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(20)],
    },
    "300 alternatives": {"oneOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(300)]},
    "product of patterns": {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]},
    "catastrophic pattern": {"type": "string", "pattern": "^(a+)+$"},
    "multipleOf": {"type": "integer", "multipleOf": 999999937},
    "small multipleOf": {"type": "number", "multipleOf": 1e-7, "minimum": 0},
    "range of integers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "range of numbers": {"type": "number", "minimum": 1.2345678901234567e-300, "maximum": 1e300},
    "unknown type": {"type": "nonsense"},
    "1,500 properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
    "pattern properties": {"type": "object", "patternProperties": {f"^a{i}.*b": {} for i in range(300)}},
    "dynamic reference": {"$dynamicRef": "#x"},
    "reference to a server": {"$ref": "https://example.com/x"},
    "reference to a file": {"$ref": "file:///etc/passwd"},
    "reference to nothing": {"$ref": "#/$defs/x"},
    "unknown format": {"type": "string", "format": "unknown"},
    "not": {"not": {}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "string"}, "then": {}},
    "long constant": {"const": "x" * 60_000},
    "anyOf of anyOf": repeated("anyOf", 10),
    "allOf of allOf": repeated("allOf", 10),
    "properties of a wrong type": {"type": "object", "properties": [1]},
    "numbers as keywords": {"type": 3, "required": "x", "enum": {}},
    "options of the library": {"x-guidance": {"whitespace_pattern": "(a*)*", "unknown": 1}},
}
REGEXES: dict[str, str] = {
    "repeated": "a{1,1000000}",
    "repeated repeatedly": "(((a{1,1000}){1,1000}){1,1000}){1,1000}",
    "too many": "a{1,99999999999}",
    "nested plus": "(a+)+b",
    "same twice": "(a|a)*b",
    "many stars": "(.*a){25}",
    "distance": "(.*a.{50}){20}",
    "long distance": ".*a.{200}b.{200}",
    "10,000 parentheses": "(" * 10_000 + "a" + ")" * 10_000,
    "240 parentheses": "(" * 240 + "a" + ")" * 240,
    "classes": "|".join(f"[{chr(97 + i % 26)}-z]{{{i},{i + 50}}}" for i in range(500)),
    "5,000 words": "|".join(f"word{i}x" for i in range(5000)),
    "Unicode": r"\p{L}{1,100}\p{N}{1,100}",
    "word characters": r"(\w\W){2000}",
    "look-around": "(?=a)b",
    "back-reference": r"(a)\1",
    "unclosed": "(a",
    "NUL": "a\0b",
    "nothing": r"[^\s\S]",
    "flags": "(?i)" + "abc" * 500,
    "slashes": "a/b\\/c",
}
GRAMMARS: dict[str, dict[str, str]] = {
    "10,000 parentheses": lark("start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "10,000 question marks": lark('start: "a"' + "?" * 10_000),
    "10,000 brackets": lark("start: " + "[" * 10_000 + '"a"' + "]" * 10_000),
    "10,000 tildes": lark("start: A", "A: " + "~" * 10_000 + "/a/"),
    "ambiguous": lark("start: e", 'e: e e | e e e | "a"'),
    "left recursion": lark("start: start start | "),
    "repeated": lark("start: ((x{1,1000}){1,1000}){1,1000}", 'x: "a" | "b"'),
    "doubled 3,000 times": lark("start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)), 'r3000: "a"'),
    "chain of 3,000 rules": lark("start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "a"'),
    "chain of 3,000 terminals": lark("start: T0", *(f"T{i}: T{i + 1}" for i in range(3000)), 'T3000: "a"'),
    "doubled terminals": lark("start: T0", *(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)), 'T40: "a"'),
    "terminal of itself": lark("start: A", "A: A"),
    "unknown name": lark("start: nope"),
    "import of a file": lark("%import ../../etc/passwd", "start: INT"),
    "deep JSON": lark("start: %json " + '{"a":' * 5000 + "1" + "}" * 5000),
    "unknown grammar": lark("start: @x"),
    "substrings": lark('start: %regex {"substring_chars": "' + "ab" * 20_000 + '"}'),
    "garbage": lark("\x00\x01\ufffd{{{"),
    "GBNF of 10,000 parentheses": lark("root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "GBNF of 8,000 rules": lark("root ::= a", *(f"a{i} ::= [a-z]" for i in range(4000))),
    "GBNF with an open string": lark('root ::= "a' + "\\" * 9999),
}
HOSTILE: dict[str, Callable[[], StructuredOutputsParams]] = {
    **{f"schema: {name}": lambda value=value: Form(json=value) for name, value in SCHEMAS.items()},
    **{f"regex: {name}": lambda value=value: Form(regex=value) for name, value in REGEXES.items()},
    **{f"grammar: {name}": lambda value=value: Form(**value) for name, value in GRAMMARS.items()},
}


def ask(process: CheckProcess, form: StructuredOutputsParams) -> str | Refused:
    """The answer, however busy the machine is."""
    for _ in range(30):
        with contextlib.suppress(QueueFullError):
            return process.check(form)
    raise AssertionError("no answer")


@pytest.fixture(scope="module")
def process() -> Iterator[CheckProcess]:
    process = CheckProcess(deadline_s=5)
    yield process
    process.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_compiled_or_refused(process: CheckProcess, name: str) -> None:
    try:
        form = HOSTILE[name]()
    except InvalidParameterError:
        return
    answer = ask(process, form)
    if isinstance(answer, Refused):
        assert 0 < len(answer.reason) <= 200
        assert answer.reason.isprintable()
        assert "0x" not in answer.reason
        assert ".rs" not in answer.reason
    assert isinstance(ask(process, GOOD), str), "the next one is answered"


def test_there_are_many() -> None:
    assert len(HOSTILE) >= 60


def test_one_without_end_is_given_up_at_the_deadline() -> None:
    process = CheckProcess(deadline_s=0.5)
    answer = ask(process, ENDLESS)
    assert isinstance(answer, Refused)
    assert "deadline of 0.5 s" in answer.reason
    assert isinstance(process.check(GOOD), str)
    process.close()


def test_others_wait_no_longer_than_the_deadline() -> None:
    process = CheckProcess(deadline_s=1.0)
    process.check(GOOD)
    process._turn.acquire()  # as another thread's grammar does
    with pytest.raises(QueueFullError, match="within 1 s"):
        process.check(GOOD)
    process._turn.release()
    assert isinstance(process.check(GOOD), str)
    process.close()


def test_a_process_that_got_no_time_to_compute_refuses_nothing() -> None:
    """On a machine that is too busy a good grammar must not be called a bad one."""
    process = CheckProcess(deadline_s=4.0)
    process.check(GOOD)
    child = process._process
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(QueueFullError, match="within 4 s"):
        process.check(Form(regex="abc"))
    assert isinstance(process.check(GOOD), str)
    process.close()


def test_a_process_that_was_killed_is_replaced(process: CheckProcess) -> None:
    process.check(GOOD)
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert isinstance(process.check(GOOD), str)


def test_closing_ends_the_process() -> None:
    process = CheckProcess()
    process.check(GOOD)
    child = process._process
    assert child is not None
    assert child.poll() is None
    process.close()
    assert child.poll() is not None


def test_one_process_for_all() -> None:
    assert shared_check_process() is shared_check_process()


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Form(regex="(a"), "unclosed group"),
        (Form(regex="(?=a)b"), "look-around"),
        (Form(regex=r"[^\s\S]"), "no text matches it"),
        (Form(json={"if": {}}), r'Unimplemented keys: \["if"\]'),
        (Form(json={"$ref": "#"}), "no text matches it"),
        (Form(grammar="start: nope"), "nope"),
    ],
)
def test_reasons(process: CheckProcess, form: StructuredOutputsParams, says: str) -> None:
    answer = process.check(form)
    assert isinstance(answer, Refused)
    assert re.search(says, answer.reason), answer.reason


def test_whitespace_options_are_asked_for(process: CheckProcess) -> None:
    default, none, own = (
        process.check(Form(json={}, **fields))
        for fields in ({}, {"disable_any_whitespace": True}, {"whitespace_pattern": "_"})
    )
    assert len({default, none, own}) == 3
    refused = process.check(Form(json={}, whitespace_pattern="("))
    assert isinstance(refused, Refused)
