import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from quire.errors import ModelFileError, UnsupportedModelError
from quire.text.gguf_tokenizer import build_gguf_tokenizer
from quire.text.tokenizer import Tokenizer, load_tokenizer_gguf
from quire.weights.gguf_file import read_gguf
from tests.text.builders import (
    TEXTS,
    byte_level_backend,
    byte_level_metadata,
    byte_level_tokenizer,
    ggml,
    merges_from_scores,
    sentencepiece_metadata,
    sentencepiece_pieces,
    sentencepiece_tokenizer,
)


@given(TEXTS)
def test_byte_level_equals_the_tokenizer_it_describes(text: str) -> None:
    assert byte_level_tokenizer().encode(text) == byte_level_backend().encode(text).ids


# --- SentencePiece against its own rule -------------------------------------------------------


@pytest.fixture(scope="module")
def llama_oracle() -> Any:
    """Transformers' Llama tokenizer of the same pieces and scores."""
    llama = pytest.importorskip("transformers.models.llama.tokenization_llama")
    convert = pytest.importorskip("transformers.tokenization_utils_base")
    vocab = {piece: index for index, (piece, _, _) in enumerate(sentencepiece_pieces())}
    merges = convert.generate_merges(vocab, {piece: score for piece, score, _ in sentencepiece_pieces()})
    return llama.LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)


@given(text=TEXTS.filter(lambda text: text[:1] not in (" ", "▁") and "<" not in text))
def test_sentencepiece_equals_transformers(llama_oracle: Any, text: str) -> None:
    # Transformers adds no space before text that begins with one; SentencePiece and llama.cpp always do.
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == llama_oracle(text)["input_ids"]
    assert tokenizer.decode(ids) == llama_oracle.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def gemma4_pair() -> tuple[Tokenizer, Any]:
    """Return a tokenizer of Gemma 4's kind, and Transformers' of the same pieces and merges."""
    gemma = pytest.importorskip("transformers.models.gemma.tokenization_gemma")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [piece for piece, _, kind in sentencepiece_pieces() if kind in (1, 6)]
    scores = {piece: score for piece, score, kind in sentencepiece_pieces() if kind == 1}
    merges, tokens = merges_from_scores(scores), [*special, *pieces]
    oracle = gemma.GemmaTokenizer({token: index for index, token in enumerate(tokens)}, merges)
    types = [6 if token.startswith("<0x") else 3 if token in special else 1 for token in tokens]
    ids = {"eos_token_id": 1, "bos_token_id": 2, "unknown_token_id": 3}
    lines = [" ".join(merge) for merge in merges]
    return load_tokenizer_gguf(
        ggml({"model": "gemma4", "tokens": tokens, "token_type": types, "merges": lines, **ids})
    ), oracle


@given(text=TEXTS.filter(lambda text: "<" not in text))
def test_gemma4_equals_transformers(gemma4_pair: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, oracle = gemma4_pair
    ids = tokenizer.encode(text)
    assert ids == [2, *oracle(text, add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_gemma4_needs_merges(gemma4_pair: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"no tokenizer\.ggml\.merges"):
        load_tokenizer_gguf(sentencepiece_metadata(model="gemma4"))


@pytest.mark.parametrize("merge", ["é a", "a zz"])
def test_merges_to_unknown_pieces_are_refused_in_sentencepiece_files(merge: str) -> None:
    tokens = ["<unk>", "<bos>", "<eos>", "é", "a"]
    metadata = ggml({"model": "gemma4", "tokens": tokens, "token_type": [2, 3, 3, 1, 1], "merges": [merge]})
    with pytest.raises(ModelFileError, match="merge 0 of 1"):
        load_tokenizer_gguf(metadata)


def test_sentencepiece_adds_a_space_before_a_leading_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    pieces = [tokenizer.id_to_token(token_id) or "" for token_id in tokenizer.encode(" 12", add_special_tokens=False)]
    assert "".join(pieces) == "▁▁12"
    assert tokenizer.decode(tokenizer.encode(" 12")) == " 12"


def test_space_prefix_is_optional() -> None:
    with_prefix = sentencepiece_tokenizer()
    without = load_tokenizer_gguf(sentencepiece_metadata(add_space_prefix=False))
    assert (with_prefix.id_to_token(with_prefix.encode("the")[1]) or "").startswith("▁")
    assert not (without.id_to_token(without.encode("the")[1]) or "").startswith("▁")
    assert without.decode(without.encode(" the")) == " the"


def test_sentencepiece_adds_a_space_after_each_special_token() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("</s>the", add_special_tokens=False)
    assert ids == [2, *tokenizer.encode("the", add_special_tokens=False)]


# --- BOS, EOS, added tokens -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_bos_is_added_by_flag_or_by_default_of_the_kind(pre: str, flag: bool | None, adds: bool) -> None:
    tokenizer = load_tokenizer_gguf(byte_level_metadata(pre, bos_token_id=1, add_bos_token=flag))
    assert tokenizer.encode("a")[:-1] == ([1] if adds else [])
    assert 1 not in tokenizer.encode("a", add_special_tokens=False)


def test_control_and_user_defined_tokens_are_matched_whole() -> None:
    metadata = byte_level_metadata(tokens=None)
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "<think>", "  two spaces", "<é>"]
    types = [*byte_level_metadata()["tokenizer.ggml.token_type"], 4, 4, 3]
    tokenizer = load_tokenizer_gguf({**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    first = len(tokens) - 3
    ids = tokenizer.encode("<think>  two spaces<é>")
    assert ids == [first, first + 1, first + 2]
    assert tokenizer.special_token_ids == {0, 1, first + 2}
    assert tokenizer.decode(ids) == "<think>  two spaces"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>  two spaces<é>"


def test_variables_and_templates_for_chats() -> None:
    parts = build_gguf_tokenizer(
        {
            **sentencepiece_metadata(),
            "tokenizer.chat_template": "default one",
            "tokenizer.chat_template.tool_use": "with tools",
            "tokenizer.chat_templates": ["tool_use"],
        }
    )
    assert parts.chat_templates == {"default": "default one", "tool_use": "with tools"}
    assert parts.template_variables == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_empty_strings_in_the_vocabulary_decode_to_nothing() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["", ""]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    tokenizer = load_tokenizer_gguf(metadata)
    assert tokenizer.decode([len(metadata["tokenizer.ggml.tokens"]) - 1]) == ""


# --- Bad files --------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no kind", {"model": None}, "missing required field `tokenizer.ggml.model`"),
    ("kind is a number", {"model": 3}, "got `int` - at `\\$.tokenizer.ggml.model`"),
    ("empty tokens", {"tokens": []}, r"tokenizer\.ggml\.tokens is empty"),
    ("empty tokens of SentencePiece", {"model": "llama", "tokens": []}, r"tokenizer\.ggml\.tokens is empty"),
    ("no tokens", {"tokens": None}, "missing required field `tokenizer.ggml.tokens`"),
    ("tokens are text", {"tokens": "abc"}, "got `str` - at `\\$.tokenizer.ggml.tokens`"),
    ("a token is a number", {"tokens": ["a", 1]}, "got `int` - at `\\$.tokenizer.ggml.tokens"),
    ("a token twice", {"tokens": ["a", "b", "a"], "token_type": None, "merges": []}, "'a' twice, at 0 and 2"),
    ("no merges", {"merges": None}, "no tokenizer.ggml.merges"),
    ("merge of one piece", {"merges": ["t h", "the"]}, r"merges\[1\] is 'the'"),
    ("merge of nothing", {"merges": [" "]}, r"merges\[0\]"),
    ("merge of an unknown token", {"merges": ["t zz"]}, "merge 0 of 1"),
    ("too few types", {"token_type": [1, 1]}, "token_type has 2 entries for 538"),
    ("types are not numbers", {"token_type": "x"}, "got `str` - at `\\$.tokenizer.ggml.token_type`"),
    ("a flag is text", {"add_bos_token": "yes"}, "got `str` - at `\\$.tokenizer.ggml.add_bos_token`"),
    ("pre is a number", {"pre": 7}, "got `int` - at `\\$.tokenizer.ggml.pre`"),
]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_corrupted_metadata_is_a_typed_error_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        load_tokenizer_gguf(byte_level_metadata(**changes))
    assert "\n" not in str(caught.value)


def test_sentencepiece_needs_a_score_for_each_token() -> None:
    with pytest.raises(ModelFileError, match=r"no tokenizer\.ggml\.scores"):
        load_tokenizer_gguf(sentencepiece_metadata(scores=None))
    with pytest.raises(ModelFileError, match="scores has 1 entries"):
        load_tokenizer_gguf(sentencepiece_metadata(scores=[0.0]))


TOLERATED: list[tuple[str, dict[str, Any], str]] = [
    ("eos out of range", {"eos_token_id": 538}, "eos_token_id is 538, which is none of the file's 538 tokens"),
    ("padding out of range", {"padding_token_id": 9999}, "padding_token_id is 9999"),
    ("bos negative", {"bos_token_id": -7}, "bos_token_id is -7"),
    ("bos is text", {"bos_token_id": "1"}, "bos_token_id is '1'"),
    ("bos is a flag", {"bos_token_id": True}, "bos_token_id is True"),
    ("bos is none", {"bos_token_id": 2**32 - 1, "eos_token_id": -1}, ""),
    ("bos wanted but missing", {"add_bos_token": True}, "add_bos_token is true, but the file has no such token"),
    ("a flag is a number", {"add_bos_token": 0}, "add_bos_token is the number 0"),
    ("too many types", {"token_type": [3, 3, *[1] * 540]}, "token_type has 542 entries for 538 tokens"),
    ("template is a number", {"chat_template": 1}, ""),
]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in TOLERATED], ids=[case[0] for case in TOLERATED])
def test_keys_that_llama_cpp_does_without_are_left_out_with_a_warning(
    changes: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer_gguf(byte_level_metadata(**changes))
    assert tokenizer.encode("the fox<|end|>") == byte_level_tokenizer().encode("the fox<|end|>")
    assert (message in caplog.text) if message else not caplog.records


def test_chat_template_that_is_no_text_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    templates = {"tokenizer.chat_template": 1, "tokenizer.chat_template.tool_use": "with tools"}
    assert load_tokenizer_gguf({**byte_level_metadata(), **templates}).chat_templates == {"tool_use": "with tools"}
    assert "the chat template 'default' is int, not a string" in caplog.text


def with_tokens(*added: tuple[str, int], **changes: Any) -> dict[str, Any]:
    """Return byte-level metadata with further tokens of these texts and types."""
    whole = byte_level_metadata()
    tokens = [*whole["tokenizer.ggml.tokens"], *(text for text, _ in added)]
    types = [*whole["tokenizer.ggml.token_type"], *(kind for _, kind in added)]
    return byte_level_metadata(tokens=tokens, token_type=types, **changes)


@pytest.mark.parametrize(
    ("added", "changes", "expected"),
    [
        ([("<|im_end|>", 3)], {"eos_token_id": None}, {0, 538}),  # <|end|> is one, too
        ([("<|im_end|>", 4)], {"eos_token_id": 9}, {0, 538}),  # token 9 is ordinary text
        ([("<|im_end|>", 1)], {"eos_token_id": None}, {0}),
        ([("<|return|>", 3), ("<|call|>", 3)], {"eos_token_id": 538}, {538, 539}),  # <|end|> ends a part
        ([("<x>", 3), ("<y>", 3)], {"eot_token_id": 538, "eom_token_id": 539}, {0, 538, 539}),
        ([("</s>", 4)], {}, {0}),  # a tag of HTML
        ([("</s>", 3)], {"eot_token_id": 9}, {0, 538}),
    ],
)
def test_ends_are_control_tokens_that_the_file_names_or_whose_texts_are_known(
    added: list[tuple[str, int]], changes: dict[str, Any], expected: set[int]
) -> None:
    assert load_tokenizer_gguf(with_tokens(*added, **changes)).end_token_ids == expected


def test_wrong_end_stays_ordinary_text(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer_gguf(with_tokens(eos_token_id=9))
    text = tokenizer.token_text(9)
    assert (tokenizer.eos_token_id, tokenizer.decode([9]), tokenizer.encode(text)) == (None, text, [9])
    assert "as the end of a text, which is ordinary text" in caplog.text


def test_named_end_of_a_file_without_types_is_special() -> None:
    tokenizer = load_tokenizer_gguf(byte_level_metadata(token_type=None, eos_token_id=0))
    assert (tokenizer.end_token_ids, tokenizer.decode([0])) == ({0}, "")


@pytest.mark.parametrize(("absent", "expected"), [("</s>", "</s>"), ("<x>", None)])
def test_default_end_of_sentencepiece_is_not_another_models_bos(absent: str, expected: str | None) -> None:
    metadata = sentencepiece_metadata(eos_token_id=None)
    tokens = metadata["tokenizer.ggml.tokens"]
    if absent != "</s>":
        tokens[2], tokens[300] = "<bos>", "<end_of_turn>"
        metadata["tokenizer.ggml.token_type"][300] = 3
    assert load_tokenizer_gguf(metadata).template_variables.get("eos_token") == expected


@pytest.mark.parametrize(("changes", "name"), [({"model": "bert"}, "'bert'"), ({"pre": "martian"}, "'martian'")])
def test_unknown_kinds_are_refused_by_name(changes: dict[str, str], name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        load_tokenizer_gguf({**byte_level_metadata(), **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}})


def test_missing_pre_tokenizer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_tokenizer_gguf({k: v for k, v in byte_level_metadata().items() if not k.endswith(".pre")})
    assert "does not name its pre-tokenizer" in caplog.text


# --- SmolLM2 ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer_gguf(read_gguf(smollm2_path).metadata)


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path, transformers_reads_once: None) -> tokenizers.Tokenizer:
    """Transformers' tokenizer of the same file."""
    pytest.importorskip("torch")  # by which Transformers reads the file
    transformers = pytest.importorskip("transformers")
    path = Path(smollm2_path)
    loaded = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend: tokenizers.Tokenizer = loaded.backend_tokenizer
    return backend


@pytest.fixture(scope="module")
def oracle_with_single_digits(oracle: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the oracle with the pre-tokenizer of the model's own tokenizer.json.

    Transformers does not know the GGUF pre-tokenizer 'smollm' and cuts digits as GPT-2 does; the model was trained on
    single digits, which is also what llama.cpp does.
    """
    original = tokenizers.Tokenizer.from_str(oracle.to_str())
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return original


CHAT_FRAGMENTS = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "user\n", "42", " 7"])).map("".join)


@pytest.mark.model
@settings(max_examples=200)
@given(text=st.one_of(TEXTS, CHAT_FRAGMENTS))
def test_smollm2_equals_transformers_with_the_models_own_digit_rule(
    smollm2: Tokenizer, oracle_with_single_digits: tokenizers.Tokenizer, text: str
) -> None:
    assert smollm2.encode(text) == oracle_with_single_digits.encode(text).ids


# Its vocabulary has no token for these bytes (planes 4 to 11, some control characters); as in Transformers and
# llama.cpp, text made of them is dropped.
@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49200), max_size=40), skip=st.booleans())
def test_smollm2_decodes_any_ids_as_transformers(
    smollm2: Tokenizer, oracle: tokenizers.Tokenizer, ids: list[int], skip: bool
) -> None:
    assert smollm2.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)
