"""Tokenizers of directories as GGUF keys."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.errors import ModelFileError, UnsupportedModelError
from quire.text.gguf_tokenizer import build_gguf_tokenizer
from quire.text.tokenizer import load_tokenizer_gguf
from quire.text.tokenizer_parts import PRE_TOKENIZATIONS
from quire_workshop.gguf.tokenizer_export import SAMPLES, describe_tokenizer
from tests.text.builders import byte_level_metadata, sentencepiece_backend, sentencepiece_metadata, word_piece_tokenizer


def directory(path: Path, backend: tokenizers.Tokenizer) -> Path:
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("pre", PRE_TOKENIZATIONS)
def test_pre_tokenizer_is_recognised(tmp_path: Path, pre: str) -> None:
    backend = build_gguf_tokenizer(byte_level_metadata(pre)).backend
    keys = describe_tokenizer(directory(tmp_path, backend), 610)
    rules = [PRE_TOKENIZATIONS[name] for name in (keys["tokenizer.ggml.pre"], pre)]
    assert rules[0].splits == rules[1].splits
    assert len(keys["tokenizer.ggml.tokens"]) == 610
    assert keys["tokenizer.ggml.token_type"][:3] == [3, 3, 1]


@pytest.mark.parametrize(
    ("changes", "has_merges"), [({}, False), ({"add_space_prefix": False}, False), ({"add_space_prefix": False}, True)]
)
def test_sentencepiece_keeps_its_ids(tmp_path: Path, changes: dict[str, Any], has_merges: bool) -> None:
    expected = load_tokenizer_gguf(sentencepiece_metadata(**changes))
    backend = sentencepiece_backend(sentencepiece_metadata(**changes))
    keys = describe_tokenizer(directory(tmp_path, backend), expected.vocab_size, has_merges=has_merges)
    assert keys["tokenizer.ggml.model"] == ("gemma4" if has_merges else "llama")
    found = build_gguf_tokenizer(keys).backend
    for text in SAMPLES:
        assert found.encode(text, add_special_tokens=False).ids == expected.encode(text, add_special_tokens=False)


def test_tokenizers_that_gguf_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="the tokenizer is WordPiece"):
        describe_tokenizer(directory(tmp_path, word_piece_tokenizer()._backend), 100)
    backend = build_gguf_tokenizer(byte_level_metadata()).backend
    with pytest.raises(ModelFileError, match="the model 100"):
        describe_tokenizer(directory(tmp_path, backend), 100)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with pytest.raises(UnsupportedModelError, match="as none of the pre-tokenizers"):
        describe_tokenizer(directory(tmp_path, backend), 610)
