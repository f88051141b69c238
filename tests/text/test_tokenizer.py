import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import PromptError
from quire.text.tokenizer import LONG_TEXT, Tokenizer
from quire.text.tokenizer_parts import TokenizerParts
from tests.text.builders import (
    byte_level_backend,
    byte_level_tokenizer,
    sentencepiece_backend,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
    word_piece_tokenizer,
)


@given(st.lists(st.integers(0, 700), max_size=30), st.booleans())
def test_byte_level_decodes_any_ids_as_the_library(ids: list[int], skip: bool) -> None:
    expected = byte_level_backend().decode(ids, skip_special_tokens=skip)
    assert byte_level_tokenizer().decode(ids, skip_special_tokens=skip) == expected


@given(st.lists(st.integers(3, 258) | st.integers(259, 700), max_size=30), st.booleans())
def test_sentencepiece_decodes_as_the_library_where_the_bytes_are_text(ids: list[int], skip: bool) -> None:
    tokenizer = sentencepiece_tokenizer()
    backend = sentencepiece_backend(sentencepiece_metadata())
    expected = backend.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in expected:
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_valid_character_is_kept_beside_an_invalid_byte() -> None:
    # The library replaces a whole run of byte tokens for one bad byte; streamed text cannot be taken back.
    tokenizer = sentencepiece_tokenizer()
    ids = [byte + 3 for byte in "é".encode() + b"\xff"]
    assert tokenizer.decode(ids) == "é\ufffd"
    assert sentencepiece_backend(sentencepiece_metadata()).decode(ids) == "\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer, word_piece_tokenizer])
def test_ids_outside_the_vocabulary_decode_to_nothing(make: type[Tokenizer]) -> None:
    tokenizer = make()
    for token_id in (-1, tokenizer.vocab_size, 2**40):
        assert tokenizer.decode([token_id]) == ""
        assert tokenizer.id_to_token(token_id) is None


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
def test_only_text_is_encoded(text: object) -> None:
    with pytest.raises(PromptError, match=f"must be a string, got {type(text).__name__}"):
        byte_level_tokenizer().encode(text)  # type: ignore[arg-type]


def test_half_of_a_surrogate_pair_is_refused_by_position() -> None:
    with pytest.raises(PromptError, match=r"U\+D83E\) at character 2"):
        byte_level_tokenizer().encode("ab\ud83e")


def test_long_text_has_the_tokens_of_its_parts() -> None:
    tokenizer = byte_level_tokenizer()
    word = "hello world\n"
    assert tokenizer.encode(word * LONG_TEXT) == tokenizer.encode(word) * LONG_TEXT
    with pytest.raises(PromptError, match=rf"U\+D83E\) at character {LONG_TEXT + 1}"):
        tokenizer.encode("a" * (LONG_TEXT + 1) + "\ud83e")


def test_tokens_without_an_embedding_are_refused() -> None:
    parts = TokenizerParts(backend=byte_level_backend(), bos_token_id=None, eos_token_id=None)
    vocab_size = byte_level_backend().get_vocab_size()
    last = byte_level_backend().id_to_token(vocab_size - 1)
    text = byte_level_backend().decode([vocab_size - 1])
    limited = Tokenizer(parts, model_vocab_size=vocab_size - 1)
    assert Tokenizer(parts, model_vocab_size=vocab_size).encode(text) == [vocab_size - 1]
    assert limited.encode("a") == byte_level_backend().encode("a").ids
    with pytest.raises(PromptError, match=f"token {vocab_size - 1}.*ends at {vocab_size - 2}") as caught:
        limited.encode(text)
    assert repr(last) in str(caught.value)


def test_token_text_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    token_ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, token_ids)) == " the fox"
    assert tokenizer.decode(token_ids) == "the fox"
    words = word_piece_tokenizer()
    assert [words.token_text(token_id) for token_id in words.encode("fox !")] == ["fox", "!"]


def test_identity_is_that_of_the_vocabulary() -> None:
    made = [make().identity for make in (byte_level_tokenizer, sentencepiece_tokenizer, word_piece_tokenizer)]
    assert len({*made}) == 3
    assert byte_level_tokenizer().identity == made[0]
