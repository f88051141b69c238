import functools

import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import pre_tokenizers

from quire.errors import ModelFileError, UnsupportedModelError
from quire.text.tokenizer import byte_level_alphabet, byte_level_bytes
from quire.text.tokenizer_parts import PRE_TOKENIZATIONS, build_byte_level, check_merges, find_pre_tokenization
from tests.text.builders import TEXTS


@functools.cache
def backend_of(name: str) -> tokenizers.Tokenizer:
    return build_byte_level(byte_level_alphabet(), [], find_pre_tokenization(name))


def pieces(name: str, text: str) -> list[str]:
    """Return the pieces that the rules `name` cut `text` into."""
    backend = backend_of(name)
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return cut_by(backend.pre_tokenizer, normalized)


def cut_by(pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [byte_level_bytes(piece).decode() for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


@given(TEXTS)
def test_gpt2_rules_are_the_librarys(text: str) -> None:
    assert pieces("gpt-2", text) == cut_by(pre_tokenizers.ByteLevel(add_prefix_space=False), text)


@given(TEXTS)
def test_smollm_rules_are_those_of_its_tokenizer_json(text: str) -> None:
    original = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert pieces("smollm", text) == cut_by(original, text)


@given(TEXTS)
def test_falcon_rules_are_those_of_its_tokenizer_json(text: str) -> None:
    original = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"[\p{P}\$\+<=>\^~\|`]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )
    assert pieces("falcon", text) == cut_by(original, text)


@pytest.mark.parametrize("name", ["tekken", "gpt-4o", "llama-bpe", "lfm2", "pixtral", "dbrx", "qwen2", "qwen35"])
@given(text=TEXTS)
def test_splits_equal_those_of_transformers(name: str, text: str) -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    split = pre_tokenizers.Split(tokenizers.Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rules = find_pre_tokenization(name)
    normalized = tokenizers.normalizers.NFC().normalize_str(text) if rules.composes else text
    assert pieces(name, text) == cut_by(pre_tokenizers.Sequence([split, byte_level]), normalized)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZATIONS))
@settings(max_examples=10)
@given(text=TEXTS)
def test_pieces_joined_are_the_text(name: str, text: str) -> None:
    rules = find_pre_tokenization(name)
    expected = tokenizers.normalizers.NFC().normalize_str(text) if rules.composes else text
    assert "".join(pieces(name, text)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-v3", ["I", "'ve", " ", "123", "4", " it", "'S", " ok", "!\n"]),
        ("deepseek-llm", ["I", "'", "ve", " ", "1", "2", "3", "4", " it", "'", "S", " ok", "!", "\n"]),
        ("default", ["I", "'", "ve", " ", "123", "4", " it", "'", "S", " ok", "!", "\n"]),
    ],
)
def test_rules_without_an_oracle_cut_an_example(name: str, expected: list[str]) -> None:
    assert pieces(name, "I've 1234 it'S ok!\n") == expected


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'llama-bp'.*did you mean 'llama-bpe'"):
        find_pre_tokenization("llama-bp")


def test_merges_outside_the_vocabulary_are_refused() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2}
    check_merges(vocab, [("a", "b")])
    for merge, missing in ((("a", "c"), "c"), (("c", "b"), "c"), (("b", "a"), "ba")):
        with pytest.raises(ModelFileError, match=f"merge 1 of 2 .*'{missing}'"):
            check_merges(vocab, [("a", "b"), merge])


def test_whole_pieces_are_taken_where_merges_are_ignored() -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "abc": 3, "ab": 4}
    merges = [("a", "b")]
    assert build_byte_level(vocab, merges, find_pre_tokenization("llama-bpe")).encode("abc").ids == [3]
    assert build_byte_level(vocab, merges, find_pre_tokenization("gpt-2")).encode("abc").ids == [4, 2]
