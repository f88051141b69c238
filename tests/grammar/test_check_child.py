"""Answers of the compiling process, asked in this process."""

import re

import llguidance
import pytest

from quire.grammar.check_child import ByteTokens, check, define

WIDE = '{"type": "object", "minProperties": 2}'
NARROW = '{"type": "object", "minProperties": 1}'


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), eos_token=[256])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"type":"object"}'),
        ("json_object", '{"type":"object"}'),
        ("regex", "a+"),
        ("choice", '["a","\\u0000é\\"\\n"]'),
        ("grammar", 'start: "a"'),
        ("grammar", 'root ::= "a" b\nb ::= [0-9]+'),
        ("grammar", f"start: %json {NARROW}"),
        ("grammar", 'root ::= "%json {" [a-z]'),
        ("grammar", 'start: /%json "/ %json {"const": "%json {"}'),
    ],
)
def test_valid_grammar_is_returned_compiled(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> None:
    assert check(tokenizer, kind, text, {}) == {"grammar": define(kind, text, {})}


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json", '{"type":"nonsense"}', "nonsense"),
        ("json", "[" * 500, ""),
        ("json", '{"uniqueItems": true}', "uniqueItems"),
        ("json", '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance.lenient"),
        ("json", '{"items": {"anyOf": [{"type": "null"}, ' + WIDE + "]}}", "minProperties above 1"),
        ("regex", "(", "unclosed"),
        ("regex", r"[^\s\S]", "NoExtension|no text"),
        ("grammar", "start: nope", "nope"),
        ("grammar", "root ::= (", ""),
        ("grammar", "%%%", ""),
        ("grammar", 'start: %json {"maximum": ' + "9" * 5000 + "}", "number out of range"),
        ("grammar", f'start: "a" (%json {WIDE})+', "minProperties above 1"),
        ("grammar", f"start: one | two\none: %json {NARROW}\ntwo: %json\n\n{WIDE} // end", "minProperties above 1"),
        ("grammar", "start: %json " + WIDE.replace("min", "\\u006din"), "minProperties above 1"),
        ("grammar", 'start: "%json \\" /" /"/ %json ' + WIDE, "minProperties above 1"),
        ("grammar", 'start: %json {"x-guidance": {"coerce_one_of": true}}', "coerce_one_of"),
    ],
)
def test_invalid_or_unenforceable_grammar_is_an_error(
    tokenizer: llguidance.LLTokenizer, kind: str, text: str, says: str
) -> None:
    answer = check(tokenizer, kind, text, {})
    assert list(answer) == ["error"]
    assert re.search(says, answer["error"])
