"""The compiling process's answers, asked within this one."""

import re

import llguidance
import pytest

from quire.grammar.check_child import ByteTokens, check, define


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), eos_token=[256])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"type":"object"}'), ("json_object", '{"type":"object"}'), ("regex", "a+"),
        ("choice", '["a","\\u0000é\\"\\n"]'), ("grammar", 'start: "a"'), ("grammar", 'root ::= "a" b\nb ::= [0-9]+'),
    ],
)  # fmt: skip
def test_what_compiles_comes_back_as_the_librarys_grammar(
    tokenizer: llguidance.LLTokenizer, kind: str, text: str
) -> None:
    answer = check(tokenizer, kind, text, {})
    assert answer == {"grammar": define(kind, text, {})}


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json", '{"type":"nonsense"}', "nonsense"),
        ("json", "[" * 500, ""),
        ("regex", "(", "unclosed"),
        ("regex", r"[^\s\S]", "NoExtension|no text"),
        ("grammar", "start: nope", "nope"),
        ("grammar", "root ::= (", ""),
        ("grammar", "%%%", ""),
    ],
)
def test_what_does_not_is_an_error(tokenizer: llguidance.LLTokenizer, kind: str, text: str, says: str) -> None:
    answer = check(tokenizer, kind, text, {})
    assert list(answer) == ["error"]
    assert re.search(says, answer["error"])
