"""The library's tokenizer: bytes, special tokens, and texts cut the model's way or longest first."""

import pytest

from quire.grammar.vocabulary import Vocabulary, _LibraryVocabulary
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
