"""Masks against independent oracles: json, re, and the list of choices."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.grammar import limits
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import TokenMatcher
from quire.structured_outputs import StructuredOutputsParams
from tests.grammar.builders import EOS, SPECIAL, TOKENS, accepts, allowed_bytes, feed, make_vocabulary

COMPILER = GrammarCompiler(make_vocabulary)


def start(**fields: Any) -> TokenMatcher:
    return COMPILER.compile(StructuredOutputsParams(**fields)).start()


def texts(seed: int, num_tokens: int, **fields: Any) -> Iterator[str]:
    """Texts of tokens drawn from those allowed, ended where the end is drawn or forced."""
    draws = random.Random(seed)
    for _ in range(8):
        matcher, raw = start(**fields), b""
        for _ in range(num_tokens):
            token_id = draws.choice(matcher.allowed().tolist())
            if token_id == EOS:
                yield raw.decode()
                break
            raw += TOKENS[token_id]
            matcher.append(token_id)
        assert matcher.failure is None


def test_the_first_tokens() -> None:
    matcher = start(choice=["abd", "b"])
    assert allowed_bytes(matcher) == {b"a", b"ab", b"b"}
    matcher.append(TOKENS.index(b"ab"))
    assert allowed_bytes(matcher) == {b"d"}
    matcher.append(ord("d"))
    assert matcher.allowed().tolist() == [EOS]


@pytest.mark.parametrize(
    "pattern", [r"[0-9]{2,4}-[a-f]+", "(ab|abc)*c?", "a{0,3}b", "(true|false)( (true|false))*", "é+"]
)
def test_drawn_texts_match_the_regex(pattern: str) -> None:
    found = [text for seed in range(10) for text in texts(seed, 40, regex=pattern)]
    assert found
    assert [text for text in found if not re.fullmatch(pattern, text)] == []


@pytest.mark.parametrize("pattern", [r"[ab]*a[ab]{3}", "(a|ab)(c|bcd)(d*)", "a?b?c?", r"[^a]+|a{2}"])
@settings(max_examples=40)
@given(text=st.text("abcd", max_size=8))
def test_a_text_is_accepted_where_re_matches_it(pattern: str, text: str) -> None:
    assert accepts(start(regex=pattern), text) == bool(re.fullmatch(pattern, text))


def test_anchors_are_harmless() -> None:
    assert accepts(start(regex="^ab$"), "ab")
    assert not accepts(start(regex="^ab$"), "abc")


def test_drawn_texts_are_choices() -> None:
    choices = ["yes", "no", "no way", "ab", "abc", 'q"u\\o\n', "é", "<eos>"]
    found = [text for seed in range(20) for text in texts(seed, 20, choice=choices)]
    assert set(found) <= set(choices)
    assert len(set(found)) > 4


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y", 3]}, "maxItems": 2},
        "inner": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def check_person(value: Any) -> None:
    assert {"name", "age"} <= set(value) <= {"name", "age", "tags", "inner"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 120
    assert len(value.get("tags", [])) <= 2
    assert all(tag in ("x", "y", 3) for tag in value.get("tags", []))
    assert value.get("inner") in (None, True, False)


@pytest.mark.parametrize("fields", [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}])
def test_drawn_texts_follow_the_schema(fields: dict[str, Any]) -> None:
    found = [text for seed in range(12) for text in texts(seed, 160, json=SCHEMA, **fields)]
    assert found
    for text in found:
        check_person(json.loads(text))
        if "disable_any_whitespace" in fields:
            # Names may hold spaces, the rest may not.
            assert not re.search(r'[\s](?=[":{}\[\],0-9])', re.sub(r'"(\\.|[^"\\])*"', '""', text))


@pytest.mark.parametrize("value", [[], {}, 1, -2.5e-3, 'a"b', None, True, {"a": [1, {"b": None}]}, "é\u2028😀"])
def test_the_empty_schema_takes_any_json(value: Any) -> None:
    for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))):
        assert accepts(start(json={}), text), text
    assert accepts(start(json_object=True), json.dumps(value)) == isinstance(value, dict)


def test_json_laid_out_on_lines_is_accepted() -> None:
    value = {"name": "a", "age": 3, "tags": ["x", "y"]}
    for indent in (1, 2, 4):
        assert accepts(start(json=SCHEMA), json.dumps(value, indent=indent))


def test_blanks_cannot_go_on_for_ever() -> None:
    matcher = start(json=SCHEMA)
    feed(matcher, "{\n\n" + " " * 20)
    assert allowed_bytes(matcher) == {b'"'}
    endless = start(json=SCHEMA, whitespace_pattern=r"\s*")
    feed(endless, "{" + "\n" * 100)


def test_lark_and_gbnf_are_the_same() -> None:
    lark = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'
    gbnf = 'root ::= number ("+" number)*\nnumber ::= [0-9]+'
    for text, good in (("1", True), ("12+3", True), ("+1", False), ("1+", False), ("", False)):
        assert accepts(start(grammar=lark), text) == accepts(start(grammar=gbnf), text) == good, text


def test_recursion() -> None:
    grammar = 'start: "(" start ")" | "a"'
    assert accepts(start(grammar=grammar), "((((a))))")
    assert not accepts(start(grammar=grammar), "((a)")
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert accepts(start(json=tree), '{"next":{"next":{}}}')


def test_special_tokens_are_never_text() -> None:
    matcher = start(regex="(?s:.)*")
    allowed = matcher.allowed()
    assert SPECIAL not in allowed
    assert EOS in allowed
    assert all(TOKENS[token_id] for token_id in allowed)
    assert np.all(np.diff(allowed) > 0)
    feed(matcher, "<tool>")


def test_after_the_end_only_ends_follow() -> None:
    matcher = start(regex="a*")
    matcher.append(EOS)
    for _ in range(3):
        assert matcher.allowed().tolist() == [EOS]
        matcher.append(EOS)
    assert matcher.failure is None


def test_several_end_tokens() -> None:
    matcher = GrammarCompiler(lambda: make_vocabulary((EOS, SPECIAL))).compile(StructuredOutputsParams(regex="a?"))
    started = matcher.start()
    assert {EOS, SPECIAL} <= set(started.allowed().tolist())
    started.append(SPECIAL)
    assert started.allowed().tolist() == sorted([EOS, SPECIAL])


@pytest.mark.parametrize("token_id", [ord("x"), EOS, SPECIAL])
def test_a_token_that_is_not_allowed_is_a_failure_for_good(token_id: int) -> None:
    matcher = start(regex="ab")
    matcher.append(token_id)
    assert matcher.failure is not None
    assert "the library that keeps texts in their form failed" in matcher.failure.reason
    assert not matcher.failure.is_of_form, "the mask forbade it: whoever chose it is to blame"
    assert matcher.failure.reason.isprintable()
    assert len(matcher.allowed()) == 0
    matcher.append(ord("a"))
    assert len(matcher.allowed()) == 0


@pytest.mark.parametrize("rule", ['x: x "c"', "x: y\ny: x", 'x: "c" x'])
def test_a_rule_that_never_ends_leaves_nothing_or_goes_on(rule: str) -> None:
    """What only the library's own grammars can say; schemas of this kind are refused."""
    matcher = start(grammar=f'start: "a" x | "b"\n{rule}')
    matcher.append(ord("a"))
    if matcher.allowed().tolist():
        assert allowed_bytes(matcher) == {b"c"}
    else:
        assert matcher.failure is not None
        assert "nothing may come next" in matcher.failure.reason


def test_a_grammar_that_explodes_while_it_is_followed_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text has states of its own: what one of them used up is not missing for the next."""
    monkeypatch.setattr(limits, "MAX_LEXER_STATES", 500)
    form = {"regex": "(.*a.{50}){20}"}

    def follow() -> int:
        matcher, draws = start(**form), random.Random(0)
        for num_tokens in range(400):
            if matcher.failure is not None:
                return num_tokens
            matcher.allowed()
            matcher.append(ord(draws.choice("ab")))
        return 400

    first = follow()
    assert first < 400, "it explodes"
    assert follow() == first
