"""Searches in a vocabulary, and the library's tokenizer: bytes, special tokens, texts cut the model's way."""

from collections.abc import Callable

import pytest

from quire.grammar.matcher import Vocabulary, _LibraryVocabulary
from tests.grammar.builders import EOS, TOKENS, make_vocabulary


@pytest.mark.parametrize("raw", [b"abcab", "aébc".encode(), b"\xc3", b"a\xff", b"<eos>", b""])
def test_tokens_always_make_the_text(raw: bytes) -> None:
    """Also where the tokenizer finds a special token in it, adds a space, or cannot read it."""
    for encode in (lambda text: list(text.encode()), lambda text: [32, *text.encode()], lambda text: [EOS]):
        ids = _LibraryVocabulary(Vocabulary(TOKENS, frozenset({EOS}), (EOS,), encode))(raw)
        assert b"".join(TOKENS[token_id] for token_id in ids) == raw
        assert EOS not in ids


def test_models_own_way_comes_first() -> None:
    own = _LibraryVocabulary(make_vocabulary())
    assert own(b"abc") == [97, 98, 99]
    other = _LibraryVocabulary(Vocabulary(TOKENS, frozenset(), (EOS,), lambda text: []))
    assert other("abcd") == [TOKENS.index(b"abc"), 100]


def test_byte_without_a_token_ends_the_text() -> None:
    vocabulary = Vocabulary([b"a", b"e"], frozenset(), (1,), lambda text: [])
    assert _LibraryVocabulary(vocabulary)(b"aab") == [0, 0]


@pytest.mark.parametrize("part", [b"a", b"ab", b"abcd", "é".encode(), b"\n", b".", b"e", b"true", b"tool>", b" \xc3"])
def test_searches_find_what_a_walk_over_all_tokens_finds(part: bytes) -> None:
    vocabulary = make_vocabulary()
    found = {index: raw for index, raw in enumerate(TOKENS) if raw}
    for _ in range(2):
        assert vocabulary.containing(part) == [index for index, raw in found.items() if part in raw]
        assert vocabulary.equal_to(part) == [index for index, raw in found.items() if part == raw]
        assert vocabulary.continuing(part) == [
            index for index, raw in found.items() if raw.startswith(part) or part.startswith(raw)
        ]


@pytest.mark.parametrize(
    "encode", [lambda text: list(text.encode()), lambda text: [32, *text.encode()], lambda text: [0]]
)
def test_text_is_spelled_exactly(encode: Callable[[str], list[int]]) -> None:
    vocabulary = Vocabulary(TOKENS, frozenset({EOS}), (EOS,), encode)
    for raw in (b"abcd", b"\xc3", "é<tool>".encode()):
        assert b"".join(TOKENS[token_id] for token_id in vocabulary.spell(raw)) == raw


def test_special_tokens_spell_themselves() -> None:
    vocabulary = Vocabulary(TOKENS, frozenset({EOS}), (EOS,), lambda text: [EOS])
    assert vocabulary.spell(b"<eos>") == [EOS]
