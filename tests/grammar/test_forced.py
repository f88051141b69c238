"""Tokens that a grammar forces: at each of them no other token is allowed, and a choice ends them."""

from collections.abc import Sequence
from random import Random

import pytest

from quire.grammar.compiler import CompiledGrammar, GrammarCompiler
from quire.grammar.matcher import TokenMatcher, Vocabulary
from quire.grammar.reasoning import ReasoningMatcher
from quire.structured_outputs import ReasoningSpan, StructuredOutputsParams
from tests.grammar.builders import EOS, SPECIAL, TOKENS, encode
from tests.grammar.random_schemas import grammar_of, random_schema

NUM_SCHEMAS = 60
SCHEMA = {"type": "object", "properties": {"abcabc": {"type": "boolean"}, "abd": {"type": "integer"}},
          "required": ["abcabc", "abd"], "additionalProperties": False}  # fmt: skip


def longest_first(text: str) -> list[int]:
    """Tokens as a usual tokenizer makes them."""
    raw, ids = text.encode(), []
    while raw:
        token = max((token for token in TOKENS if token and raw.startswith(token)), key=len)
        ids.append(TOKENS.index(token))
        raw = raw[len(token) :]
    return ids


def backwards(text: str) -> list[int]:
    """Tokens of the same bytes that are found from the end: `abcab` is `abc`, `ab`, but `aab` is `a`, `ab`."""
    raw, ids = text.encode(), []
    while raw:
        token = max((token for token in TOKENS if token and raw.endswith(token)), key=len)
        ids.append(TOKENS.index(token))
        raw = raw[: -len(token)]
    return ids[::-1]


VOCABULARIES = {
    encode_text.__name__: Vocabulary(TOKENS, frozenset({EOS, SPECIAL}), (EOS,), encode_text)
    for encode_text in (encode, longest_first, backwards)
}


def check_forced(matcher: TokenMatcher, forced: Sequence[int]) -> None:
    """Follow the forced tokens. Mutates: matcher."""
    for token_id in forced:
        assert matcher.allowed().tolist() == [token_id]
        matcher.append(token_id)
    assert matcher.failure is None


@pytest.mark.parametrize("name", VOCABULARIES)
def test_no_other_token_is_allowed_where_random_schemas_force_one(name: str) -> None:
    num_compiled = num_forced = seed = 0
    while num_compiled < NUM_SCHEMAS:
        random = Random(seed)
        answer, seed = grammar_of(random_schema(random)), seed + 1
        if "error" in answer:
            continue
        num_compiled += 1
        matcher = CompiledGrammar(answer["grammar"], VOCABULARIES[name]).start()
        for _ in range(60):
            forced = matcher.forced()
            num_forced += len(forced)
            check_forced(matcher, forced)
            allowed = matcher.allowed().tolist()
            if allowed == [EOS] or matcher.failure is not None:
                break
            matcher.append(random.choice([token_id for token_id in allowed if token_id != EOS]))
    assert num_forced > NUM_SCHEMAS


@pytest.mark.parametrize("name", VOCABULARIES)
def test_key_is_forced_as_its_tokenizer_spells_it_and_whitespace_is_a_choice(name: str) -> None:
    vocabulary = VOCABULARIES[name]
    matcher = GrammarCompiler(lambda: vocabulary).compile(StructuredOutputsParams(json=SCHEMA)).start()
    for byte in b'{"':
        matcher.append(byte)
    forced = matcher.forced()
    spelled = vocabulary.encode("abcabc")
    assert forced[: len(spelled)] == spelled[: len(forced)]
    assert len(forced) >= len(spelled) - 1
    check_forced(matcher, forced)
    for byte in b'abcabc":'[len(b"".join(TOKENS[token_id] for token_id in forced)) :]:
        if not matcher.forced():
            assert byte in matcher.allowed()
        matcher.append(byte)
    assert matcher.forced() == []


def test_closing_words_of_reasoning_are_forced_then_the_answer_once_it_has_begun() -> None:
    vocabulary = VOCABULARIES["longest_first"]
    span = ReasoningSpan(start="[r]", end="[/r]", is_open=True, budget=2, closing="now[/r]\n\n")
    spec = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True, reasoning=span)
    matcher = GrammarCompiler(lambda: vocabulary).compile(spec).start()
    assert isinstance(matcher, ReasoningMatcher)
    matcher.append(ord("a"))
    assert matcher.forced() == []
    matcher.append(ord("b"))
    forced = matcher.forced()
    assert b"".join(TOKENS[token_id] for token_id in forced) == b"now[/r]\n\n"
    for token_id in forced:
        allowed = matcher.allowed()
        assert allowed is not None
        assert allowed.tolist() == [token_id]
        matcher.append(token_id)
    matcher.append(ord("{"))
    matcher.append(ord('"'))
    answer = matcher.forced()
    assert b'abcabc":'.startswith(b"".join(TOKENS[token_id] for token_id in answer))
    assert answer


def test_ended_text_forces_nothing() -> None:
    vocabulary = VOCABULARIES["encode"]
    matcher = GrammarCompiler(lambda: vocabulary).compile(StructuredOutputsParams(choice=["ab"])).start()
    matcher.append(TOKENS.index(b"ab"))
    matcher.append(EOS)
    assert matcher.forced() == []
