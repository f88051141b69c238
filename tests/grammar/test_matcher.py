"""Masks against independent oracles: json, jsonschema, re, and the list of choices."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import llguidance
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLParserLimits

from quire.grammar import limits
from quire.grammar.check_child import ByteTokens
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import TokenMatcher, failure_of
from quire.structured_outputs import StructuredOutputsParams
from tests.grammar.builders import EOS, SPECIAL, TOKENS, accepts, allowed_bytes, feed, make_vocabulary

COMPILER = GrammarCompiler(make_vocabulary)


def start(**fields: Any) -> TokenMatcher:
    return COMPILER.compile(StructuredOutputsParams(**fields)).start()


def texts(seed: int, num_tokens: int, **fields: Any) -> Iterator[str]:
    """Yield texts of randomly drawn allowed tokens that reached a stop token."""
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
def test_empty_schema_accepts_any_json(value: Any) -> None:
    for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))):
        assert accepts(start(json={}), text), text
    assert accepts(start(json_object=True), json.dumps(value)) == isinstance(value, dict)


def test_whitespace_is_bounded_by_default() -> None:
    matcher = start(json=SCHEMA)
    feed(matcher, "{\n\n" + " " * 20)
    assert allowed_bytes(matcher) == {b'"'}
    endless = start(json=SCHEMA, whitespace_pattern=r"\s*")
    feed(endless, "{" + "\n" * 100)


def test_special_tokens_are_never_text() -> None:
    matcher = start(regex="(?s:.)*")
    allowed = matcher.allowed()
    assert SPECIAL not in allowed
    assert EOS in allowed
    assert all(TOKENS[token_id] for token_id in allowed)
    assert np.all(np.diff(allowed) > 0)
    feed(matcher, "<tool>")


def test_only_stop_tokens_follow_a_stop_token() -> None:
    matcher = start(regex="a*")
    matcher.append(EOS)
    for _ in range(3):
        assert matcher.allowed().tolist() == [EOS]
        matcher.append(EOS)
    assert matcher.failure is None


def test_every_stop_token_ends_the_text() -> None:
    matcher = GrammarCompiler(lambda: make_vocabulary((EOS, SPECIAL))).compile(StructuredOutputsParams(regex="a?"))
    started = matcher.start()
    assert {EOS, SPECIAL} <= set(started.allowed().tolist())
    started.append(SPECIAL)
    assert started.allowed().tolist() == sorted([EOS, SPECIAL])


@pytest.mark.parametrize("token_id", [ord("x"), EOS, SPECIAL])
def test_forbidden_token_is_a_lasting_failure(token_id: int) -> None:
    matcher = start(regex="ab")
    matcher.append(token_id)
    assert matcher.failure is not None
    assert "the library for structured outputs failed" in matcher.failure.reason
    assert not matcher.failure.is_client_error
    assert matcher.failure.reason.isprintable()
    assert len(matcher.allowed()) == 0
    matcher.append(ord("a"))
    assert len(matcher.allowed()) == 0


@pytest.mark.parametrize("rule", ['x: x "c"', "x: y\ny: x", 'x: "c" x'])
def test_endless_rule_fails_or_continues(rule: str) -> None:
    matcher = start(grammar=f'start: "a" x | "b"\n{rule}')
    matcher.append(ord("a"))
    if matcher.allowed().tolist():
        assert allowed_bytes(matcher) == {b"c"}
    else:
        assert matcher.failure is not None
        assert "no token may come next" in matcher.failure.reason


def test_grammar_with_too_many_states_fails_its_own_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LEXER_STATES", 500)

    def follow() -> int:
        matcher, draws = start(regex="(.*a.{50}){20}"), random.Random(0)
        for num_tokens in range(400):
            if matcher.failure is not None:
                return num_tokens
            matcher.allowed()
            matcher.append(ord(draws.choice("ab")))
        return 400

    first = follow()
    assert first < 400
    assert follow() == first


# --- Names have one spelling ------------------------------------------------------------------

OPEN: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("a", "é", "😀", 'q"', "\n", "\x1f", "\x7f", "a/b", "b\\")},
    "additionalProperties": {"type": "string"},
}


def spellings(character: str) -> set[str]:
    """Return all ways to write a character in JSON."""
    units = character.encode("utf-16-be")
    long = "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    short = json.dumps(character)[1:-1]
    found = {long, long.upper().replace("\\U", "\\u"), short, "\\/" if character == "/" else short}
    return found | ({character} if character not in '"\\' and character >= " " else set())


@pytest.mark.parametrize("name", OPEN["properties"])
def test_declared_name_has_one_spelling_and_its_own_schema(name: str) -> None:
    keys = [spelling + json.dumps(name[1:], ensure_ascii=False)[1:-1] for spelling in spellings(name[0])]
    assert all(json.loads(f'{{"{key}":"x"}}') == {name: "x"} for key in keys)
    assert not any(accepts(start(json=OPEN), f'{{"{key}":"x"}}') for key in keys), "another key beside the declared one"
    assert sum(accepts(start(json=OPEN), f'{{"{key}":1}}') for key in keys) == 1


def test_strings_have_short_escapes_and_no_unicode_escapes() -> None:
    value = {"x": '\b\t\n\f\r"\\/é😀'}
    text = json.dumps(value, ensure_ascii=False)
    assert json.loads(text) == value
    assert accepts(start(json={"type": "object"}), text)
    assert accepts(start(json={"type": "object"}), '{"x": "\\\\u0061"}'), "an escaped backslash begins no escape"
    assert not accepts(start(json={"type": "object"}), '{"x": "\\u0061"}')
    assert not accepts(start(json={"patternProperties": {"^a": {"type": "integer"}}}), '{"\\u0061":"x"}')


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"enum": ["x", None]}},
    {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_texts_with_repeated_keys_and_escapes_follow_their_schema(schema: dict[str, Any]) -> None:
    """Repeated keys are likely: only a, b and their escapes are drawn."""
    likely = set(b'{}":,abx1\\u06') | {TOKENS.index(b"true"), EOS}
    validator, num_complete = Draft202012Validator(schema), 0
    for seed in range(60):
        draws, matcher, raw = random.Random(seed), start(json=schema), b""
        for _ in range(60):
            found = matcher.allowed().tolist()
            token_id = draws.choice([token for token in found if token in likely] or found)
            if token_id == EOS:
                validator.validate(json.loads(raw))
                num_complete += 1
                break
            raw += TOKENS[token_id]
            matcher.append(token_id)
        assert matcher.failure is None
    assert num_complete


# --- Failures in the library's own words ------------------------------------------------------

EXPLODES = "start: /(.*a.{12}b)+/"


def error_of(grammar: str, text: str, **limits: int) -> str:
    """Return llguidance's error after some of these characters."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), eos_token=[256])
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, **limits))
    assert not matcher.is_error()
    for character in text.encode():
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_token(character):
            break
    return matcher.get_error()


@pytest.mark.parametrize(
    ("grammar", "limits"),
    [
        (EXPLODES, {"max_lexer_states": 50, "initial_lexer_fuel": 1_000_000}),
        (EXPLODES, {"step_lexer_fuel": 20, "initial_lexer_fuel": 1_000_000}),
        ('start: s\ns: s s | "a" | ""', {"max_items_in_row": 10}),
        ('start: s\ns: s s | "a" | "b" s', {"step_max_items": 5}),
        ('start: "a" x\nx: "b" x', {}),
        ('start: "a" x\nx: x "b"', {}),
    ],
)
def test_broken_limit_is_a_client_error(grammar: str, limits: dict[str, int]) -> None:
    message = error_of(grammar, "abab" * 50 if grammar == EXPLODES else "a" * 50, **limits)
    assert message
    failure = failure_of(message)
    assert failure.is_client_error, message
    assert "the grammar of structured_outputs cannot be followed any further" in failure.reason
