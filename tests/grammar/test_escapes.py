"""One spelling for each name: a second one would be another key to the library and the same to who reads the JSON."""

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.grammar.compiler import GrammarCompiler
from quire.grammar.escapes import EscapeRule
from quire.grammar.matcher import TokenMatcher
from quire.structured_outputs import StructuredOutputsParams
from tests.grammar.builders import EOS, TOKENS, accepts, allowed_bytes, feed, make_vocabulary

COMPILER = GrammarCompiler(make_vocabulary)
OPEN: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("a", "é", "😀", 'q"', "\n", "\x1f", "\x7f", "a/b", "b\\")},
    "additionalProperties": {"type": "string"},
}


def start(schema: dict[str, Any]) -> TokenMatcher:
    return COMPILER.compile(StructuredOutputsParams(json=schema)).start()


def spellings(character: str) -> set[str]:
    """All ways to write it in JSON."""
    units = character.encode("utf-16-be")
    long = "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    short = json.dumps(character)[1:-1]
    found = {long, long.upper().replace("\\U", "\\u"), short, "\\/" if character == "/" else short}
    return found | ({character} if character not in '"\\' and character >= " " else set())


@pytest.mark.parametrize("name", OPEN["properties"])
def test_a_declared_name_is_no_other_key_however_it_is_written(name: str) -> None:
    for spelling in spellings(name[0]):
        text = f'{{"{spelling}{json.dumps(name[1:], ensure_ascii=False)[1:]}:"x"}}'
        assert json.loads(text) == {name: "x"}, "the text is JSON, and breaks the schema"
        assert not accepts(start(OPEN), text), text


@pytest.mark.parametrize("name", OPEN["properties"])
def test_a_declared_name_can_be_written_once(name: str) -> None:
    assert sum(accepts(start(OPEN), f'{{"{spelling}{json.dumps(name[1:], ensure_ascii=False)[1:]}:1}}')
               for spelling in spellings(name[0])) == 1  # fmt: skip


def test_a_name_of_a_pattern_is_no_other_key() -> None:
    schema = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}
    assert accepts(start(schema), '{"a1":1,"b":"x"}')
    assert not accepts(start(schema), '{"\\u0061":"x"}')


def test_strings_keep_all_that_needs_an_escape() -> None:
    value = {"x": "".join(map(chr, range(0x20))) + '"\\/é😀'}
    text = json.dumps(value, ensure_ascii=False)
    assert json.loads(text) == value
    assert accepts(start({"type": "object"}), text)
    assert accepts(start({"type": "object"}), '{"x": "\\\\u0061"}'), "an escaped backslash begins no escape"
    assert not accepts(start({"type": "object"}), '{"x": "\\u0061"}')


def test_what_can_be_written_in_one_way_only_is_allowed() -> None:
    assert accepts(start({"const": "\x7f"}), '"\\u007f"')
    matcher = start({"type": "string", "pattern": "^[\\n]$"})
    feed(matcher, '"\\u000a"')
    assert EOS in matcher.allowed()


def test_tokens_of_several_bytes_are_judged_by_all_of_them() -> None:
    tokens = [b"a", b"\\u0061", b"x\\u00", b"u001f", b"u0041", b"n", b"001", b"00e", b"\\\\u0061", b"f\\u0001"]
    rule = EscapeRule(tokens)

    def kept(begun: bytes) -> set[bytes]:
        return {token for token, is_kept in zip(tokens, rule.allowed(begun), strict=True) if is_kept}

    assert kept(b"") == set(tokens) - {b"\\u0061"}
    assert kept(b"\\") == set(tokens) - {b"u0041", b"\\\\u0061"}
    assert kept(b"\\u") == {b"001"}
    assert kept(b"\\u001") == {b"a", b"001", b"00e", b"f\\u0001"}
    assert rule.after(b"", 2) == b"\\u00"
    assert rule.after(b"\\", 5) == b""
    assert rule.after(b"\\u", 6) == b"\\u001"
    assert rule.after(b"\\u001", 0) == b""


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"enum": ["x", None]}},
    {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_texts_drawn_from_few_names_keep_their_schema(schema: dict[str, Any]) -> None:
    """Keys that come again are likely here: only a, b and their escapes are drawn."""
    likely = set(b'{}":,abx1\\u06') | {TOKENS.index(b"true"), EOS}
    validator, num_repeated, num_complete = Draft202012Validator(schema), 0, 0
    for seed in range(150):
        draws, matcher, raw = random.Random(seed), start(schema), b""
        for _ in range(60):
            found = matcher.allowed().tolist()
            token_id = draws.choice([token for token in found if token in likely] or found)
            if token_id == EOS:
                value = json.loads(raw)
                validator.validate(value)
                num_complete += 1
                num_repeated += len(value) < len(json.loads(raw, object_pairs_hook=list))
                break
            raw += TOKENS[token_id]
            matcher.append(token_id)
        assert matcher.failure is None
    assert num_complete


def test_a_key_that_is_not_declared_may_come_again() -> None:
    """What a reader makes of it, the last value, is held to the same schema as the first."""
    assert accepts(start({"type": "object", "additionalProperties": {"type": "integer"}}), '{"x":1,"x":2}')
    assert not accepts(start({"type": "object", "properties": {"x": {"type": "integer"}}}), '{"x":1,"x":2}')
    assert b"x" in allowed_bytes(_after('{"x":1,"', {"type": "object"}))


def _after(text: str, schema: dict[str, Any]) -> TokenMatcher:
    matcher = start(schema)
    feed(matcher, text)
    return matcher
