"""Fill-in-the-middle tokens of the families, and the prompts that are made of them."""

from typing import Any

import pytest

from quire.text.infill import infill_prompt
from quire.text.tokenizer import Tokenizer, load_tokenizer_directory, load_tokenizer_gguf
from quire.text.tokenizer_parts import FimTokens, find_fim_tokens
from tests.text.builders import SPECIAL_TOKENS, byte_level_metadata, sentencepiece_metadata, sentencepiece_tokenizer
from tests.text.infill_cases import QWEN, fim_tokenizer

EOS, BOS = 256, 257


def fim_of(tokenizer: Tokenizer) -> FimTokens:
    assert tokenizer.fim is not None
    return tokenizer.fim


def shown(tokenizer: Tokenizer, prefix: str, suffix: str, **options: Any) -> str:
    """Return the prompt as text, in which a marker is one token: pieces between them are bytes."""
    prompt = infill_prompt(tokenizer, fim_of(tokenizer), prefix, suffix, **options)
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (QWEN, "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>ab<fim_suffix>yz<fim_middle>"),
        (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), "<fim-prefix>ab<fim-suffix>yz<fim-middle>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>ab<｜fim▁hole｜>yz<｜fim▁end｜>"),
        (
            ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
            "<|code_prefix|>ab<|code_suffix|>yz<|code_middle|>",
        ),
        (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "▁<PRE>ab▁<SUF>yz▁<MID>"),
        (("[SUFFIX]", "[PREFIX]", "[MIDDLE]"), "[SUFFIX]yz[PREFIX]ab"),
        (("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"), "<[fim-suffix]>yz<[fim-prefix]>ab<[fim-middle]>"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_prompt_has_the_markers_of_the_family_in_its_order(tokens: tuple[str, ...], prompt: str) -> None:
    tokenizer = fim_tokenizer(*tokens)
    assert shown(tokenizer, "ab", "yz") == prompt
    token_ids = infill_prompt(tokenizer, fim_of(tokenizer), "ab", "yz").token_ids
    num_markers = sum(token_id <= len(tokens) for token_id in token_ids)
    assert (num_markers, len(token_ids)) == (2 if "[PREFIX]" in tokens else 3, 4 + num_markers)


@pytest.mark.parametrize("tokens", [(), ("<repo_name>", "<file_sep>"), ("<fim_prefix>", "<fim_suffix>")], ids=str)
def test_vocabulary_without_all_markers_has_no_fim_tokens(tokens: tuple[str, ...]) -> None:
    assert fim_tokenizer(*tokens).fim is None


@pytest.mark.parametrize("is_special", [True, False])
def test_markers_written_in_a_text_stay_text(is_special: bool) -> None:
    """Qwen's markers are added tokens that are not special."""
    tokenizer = fim_tokenizer(*QWEN, is_special=is_special)
    prefix, suffix = "a<|fim_suffix|>b<eos>", "<|fim_middle|><|file_sep|>"
    files = [("<|fim_prefix|>.py", "<|endoftext|>")]
    token_ids = infill_prompt(tokenizer, fim_of(tokenizer), prefix, suffix, files=files).token_ids
    markers = [token_id for token_id in token_ids if token_id <= len(QWEN) or token_id >= EOS]
    names = ["<|repo_name|>", "<|file_sep|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert [QWEN[token_id - 1] for token_id in markers] == names
    assert shown(tokenizer, prefix, suffix).endswith(f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>")
    assert tokenizer.encode("<|fim_prefix|>") == [1], "a plain prompt may write them"


def test_bos_comes_first_and_eos_is_left_out() -> None:
    tokenizer = fim_tokenizer(*QWEN, adds_bos=True)
    assert tokenizer.encode("a") == [BOS, 97, EOS]
    fim = fim_of(tokenizer)
    assert infill_prompt(tokenizer, fim, "a", "b").token_ids == [BOS, 1, 97, 2, 98, 3]
    assert infill_prompt(tokenizer, fim, "a", "b", files=[("f", "")]).token_ids[:2] == [BOS, 4]
    assert infill_prompt(tokenizer, fim, "a", "b", adds_bos=False).token_ids == [1, 97, 2, 98, 3]


def test_files_come_first_with_the_markers_that_the_model_has() -> None:
    files = [("a.py", "one"), ("b.py", "two\n")]
    assert shown(fim_tokenizer(*QWEN), "x", "y", files=files) == (
        "<|repo_name|>repository\n<|file_sep|>a.py\none\n<|file_sep|>b.py\ntwo\n<|file_sep|>current\n"
        "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )
    bare = fim_tokenizer("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    assert shown(bare, "x", "y", files=files) == "a.py\none\nb.py\ntwo\n<fim_prefix>x<fim_suffix>y<fim_middle>"


@pytest.mark.parametrize(
    ("num_prefix", "num_suffix", "kept"), [(80, 80, (30, 10)), (80, 4, (36, 4)), (5, 80, (5, 35)), (20, 20, (20, 20))]
)
def test_cut_prompt_keeps_the_text_around_the_gap(num_prefix: int, num_suffix: int, kept: tuple[int, int]) -> None:
    tokenizer = fim_tokenizer(*QWEN)
    prefix, suffix = "p" * (num_prefix - 1) + "P", "S" + "s" * (num_suffix - 1)
    prompt = infill_prompt(tokenizer, fim_of(tokenizer), prefix, suffix, max_len=43)
    assert len(prompt.token_ids) == 43
    assert prompt.num_truncated == num_prefix + num_suffix - 40
    expected = f"<|fim_prefix|>{prefix[-kept[0] :]}<|fim_suffix|>{suffix[: kept[1]]}<|fim_middle|>"
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == expected


def test_last_files_are_kept_as_far_as_there_is_room() -> None:
    tokenizer = fim_tokenizer(*QWEN)
    files = [("a", "A" * 9), ("b", "B" * 9), ("c", "C" * 9)]
    whole = infill_prompt(tokenizer, fim_of(tokenizer), "x", "y", files=files)
    assert whole.num_truncated == 0
    each = len("?a\nAAAAAAAAA\n")
    for num_kept, room in ((3, 0), (2, 1), (1, each + 1), (0, 2 * each + 1)):
        prompt = infill_prompt(tokenizer, fim_of(tokenizer), "x", "y", files=files, max_len=len(whole.token_ids) - room)
        text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        assert [name in text for name in "ABC"] == [index >= 3 - num_kept for index in range(3)]
        assert prompt.num_truncated == (3 - num_kept) * each
        assert text.endswith("<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>")
    assert ("<|repo_name|>" in text, "<|file_sep|>" in text) == (False, False)


def test_markers_remain_where_nothing_else_has_room() -> None:
    tokenizer = fim_tokenizer(*QWEN)
    prompt = infill_prompt(tokenizer, fim_of(tokenizer), "ab", "cd", files=[("f", "g")], max_len=1)
    assert (prompt.token_ids, prompt.num_truncated) == ([1, 2, 3], 4 + len("?f\ng\n"))


def test_answer_ends_at_markers_and_at_the_base_models_eos() -> None:
    assert fim_of(fim_tokenizer(*QWEN)).endings == set(range(1, 7))
    assert fim_of(fim_tokenizer("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")).endings == {1, 2, 3, 4}


# --- SentencePiece ------------------------------------------------------------------------------


def test_sentencepiece_puts_a_space_before_the_prefix_only() -> None:
    tokenizer = sentencepiece_tokenizer()
    fim = FimTokens(prefix=1, suffix=2)
    prompt = infill_prompt(tokenizer, fim, "the fox", "the dog", adds_bos=False)
    pieces = [tokenizer.id_to_token(token_id) or "" for token_id in prompt.token_ids]
    at = pieces.index("</s>")
    assert "".join(pieces[1:at]) == "▁the▁fox"
    assert "".join(pieces[at + 1 :]) == "the▁dog"


# --- Files --------------------------------------------------------------------------------------


def with_control_tokens(*names: str, **ids: int) -> dict[str, Any]:
    """Return metadata of a byte-level vocabulary with more control tokens; `ids` are added to its size."""
    metadata = byte_level_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"] + [3] * len(names)
    metadata["tokenizer.ggml.tokens"] = [*tokens, *names]
    return metadata | {f"tokenizer.ggml.{key}": len(tokens) + value for key, value in ids.items()}


@pytest.mark.parametrize(
    "keys", [("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
             ("prefix_token_id", "suffix_token_id", "middle_token_id")], ids=str,
)  # fmt: skip
def test_gguf_file_names_its_tokens(keys: tuple[str, str, str]) -> None:
    metadata = with_control_tokens("<A>", "<B>", "<C>", "<D>", **{key: index for index, key in enumerate(keys)},
                                   fim_sep_token_id=3)  # fmt: skip
    size = len(metadata["tokenizer.ggml.tokens"]) - 4
    fim = fim_of(load_tokenizer_gguf(metadata))
    assert (fim.prefix, fim.suffix, fim.middle, fim.file) == (size, size + 1, size + 2, size + 3)
    assert fim.endings == set(range(size, size + 4))


def test_gguf_tokens_are_found_by_their_text() -> None:
    tokenizer = load_tokenizer_gguf(with_control_tokens("[SUFFIX]", "[PREFIX]", "[MIDDLE]"))
    assert fim_of(tokenizer).suffix_first
    assert shown(tokenizer, "ab", "<|end|>yz") == "[SUFFIX]<|end|>yz[PREFIX]ab"


def test_gguf_token_id_outside_the_vocabulary_is_left_out() -> None:
    assert load_tokenizer_gguf(with_control_tokens("<A>", fim_pre_token_id=7)).fim is None


def test_vocabularies_without_markers_are_recognised() -> None:
    assert load_tokenizer_gguf(byte_level_metadata()).fim is None
    assert load_tokenizer_gguf(sentencepiece_metadata()).fim is None
    assert find_fim_tokens({token: index for index, token in enumerate(SPECIAL_TOKENS)}.get) is None


def test_directory_tokens_are_found_by_their_text(tmp_path: Any) -> None:
    fim_tokenizer(*QWEN)._backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer_directory(tmp_path)
    assert shown(tokenizer, "ab", "yz") == "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"
