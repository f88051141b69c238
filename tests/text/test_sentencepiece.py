"""SentencePiece in native code has the ids of the tokenizers library, which is given the merges written out."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ModelFileError, PromptError
from quire.text.gguf_tokenizer import build_gguf_tokenizer
from quire.text.tokenizer import load_tokenizer_gguf
from tests.text.builders import (
    TEXTS,
    ggml,
    merges_from_scores,
    sentencepiece_backend,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
)

CHARACTERS = ["a", "b", "é", "▁", "你"]
"""Of pieces; texts have others too."""
PIECES = st.lists(st.text(st.sampled_from(CHARACTERS), min_size=1, max_size=5), unique=True, min_size=1, max_size=40)
FRAGMENTS = ["a", "b", "ab", "é", "你", " ", "  ", "▁", "z", "\x00", "🦙", "<s>", "<x>", "<x", "<xy>", "aa", "</s>"]
RANDOM_TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, Any]:
    """Metadata with few different scores, some characters without pieces, and perhaps only some bytes."""
    pieces = draw(PIECES)
    bytes_there = draw(st.sampled_from([BYTES, BYTES[:128], []]))
    entries = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<x>", 0.0, 4), ("<xy>", 0.0, 4)]
    entries += [(piece, 0.0, 6) for piece in bytes_there]
    for piece in pieces:
        entries.append((piece, float(draw(st.integers(-3, 0))), draw(st.sampled_from([1, 1, 1, 1, 1, 3, 4, 5]))))
    tokens, scores, types = (list(column) for column in zip(*entries, strict=True))
    metadata = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "unknown_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()):
        ordinary = {token: score for token, score, kind in entries if kind not in (2, 3, 6)}
        merges = draw(st.permutations(merges_from_scores(ordinary)))
        metadata |= {"model": "gemma4", "merges": [" ".join(merge) for merge in merges], "scores": None}
    return ggml(metadata)


@settings(max_examples=300, deadline=None)
@given(metadata=vocabularies(), texts=st.lists(RANDOM_TEXTS, min_size=1, max_size=5))
def test_any_vocabulary_gives_the_ids_of_the_library(metadata: dict[str, Any], texts: list[str]) -> None:
    tokenizer, library = load_tokenizer_gguf(metadata), sentencepiece_backend(metadata)
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text).ids
        assert tokenizer.encode(text) == [1, *library.encode(text).ids]


@settings(deadline=None)
@given(text=TEXTS)
@pytest.mark.parametrize("changes", [{}, {"add_space_prefix": False}, {"unknown_token_id": None}])
def test_trained_vocabulary_gives_the_ids_of_the_library(changes: dict[str, Any], text: str) -> None:
    metadata = sentencepiece_metadata(**changes)
    ids = load_tokenizer_gguf(metadata).encode(text, add_special_tokens=False)
    assert ids == sentencepiece_backend(metadata).encode(text).ids


def test_pieces_longer_than_any_word_are_merged() -> None:
    pieces = ["a" * 2**power for power in range(10)]
    metadata = ggml(
        {
            "model": "llama", "tokens": ["<unk>", "<s>", "</s>", *pieces], "add_space_prefix": False,
            "scores": [0.0, 0.0, 0.0, *map(float, range(10))], "token_type": [2, 3, 3, *[1] * 10],
        }
    )  # fmt: skip
    text = "a" * 1541
    ids = load_tokenizer_gguf(metadata).encode(text, add_special_tokens=False)
    assert ids == sentencepiece_backend(metadata | {"tokenizer.ggml.unknown_token_id": 0}).encode(text).ids
    assert ids == [12, 12, 12, 5, 3]


def test_tokens_are_found_both_ways() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"][-1] = ""
    backend, library = build_gguf_tokenizer(metadata).backend, sentencepiece_backend(metadata)
    for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"]):
        assert backend.id_to_token(token_id) == library.id_to_token(token_id)
        assert backend.token_to_id(token) == library.token_to_id(token)
    assert backend.get_vocab() == library.get_vocab()
    assert backend.get_vocab_size() == library.get_vocab_size()
    assert backend.token_to_id("no such token") is None


def test_pairs_have_nothing_around() -> None:
    tokenizer = sentencepiece_tokenizer()
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("the fox", "a dog"))
    assert tokenizer.encode_pair("the fox", "a dog") == first + second


def test_text_that_is_not_unicode_is_refused_by_position() -> None:
    with pytest.raises(PromptError, match=r"U\+D83E\) at character 2"):
        sentencepiece_tokenizer().encode("ab\ud83e")


def test_token_that_is_there_twice_is_named() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"][-1] = "<0x0A>"
    with pytest.raises(ModelFileError, match="'<0x0A>' twice, at 13 and"):
        load_tokenizer_gguf(metadata)


def test_threads_encode_at_once() -> None:
    tokenizer = sentencepiece_tokenizer()
    texts = [f"the quick {index} brown fox " * 50 for index in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]
