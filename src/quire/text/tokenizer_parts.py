"""Result of the two readers of tokenizer files, for Hugging Face directories and for GGUF, and what both find in them:
pre-tokenization rules, tokens that end a text, and tokens of a text to fill in.

Must not know: `Tokenizer`, which uses it, nor files or models. Next to read: `tokenizer.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import ModelFileError, UnsupportedModelError, nearest
from quire.files import is_panic, problem_of

# --- Tokens that mark prefix, suffix and middle of a text to fill in ------------------------------
# GGUF files may name them; in all others they are recognised by their text, as llama.cpp does.

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]"),  # Mistral; Codestral does not use its [MIDDLE]
)
"""Texts of the markers, of which a vocabulary must have all."""
_SUFFIX_FIRST = frozenset({"<[fim-prefix]>", "[PREFIX]"})
_REPOSITORIES = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<repo_name>", "<reponame>", "<REPO>")
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>")
_ENDINGS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<EOT>", "▁<EOT>"),
    *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
)
LOOKED_FOR = ", ".join(family[0] for family in _FAMILIES)
"""Markers of the prefix, for the error message about a model without them."""


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Token ids of the fill-in-the-middle format.

    Fields:
        prefix, suffix, middle: markers; `middle` is None if the answer follows the second text directly.
        suffix_first: the model was trained with the suffix before the prefix.
        repository, file: markers before the name of a repository or file; None if the model has none.
        endings: tokens that end an answer, beside EOS: the markers, and the EOS of the base model, because a model for
            chats may have another one.
    """

    prefix: int
    suffix: int
    middle: int | None = None
    suffix_first: bool = False
    repository: int | None = None
    file: int | None = None
    endings: frozenset[int] = frozenset()


def find_fim_tokens(
    token_to_id: Callable[[str], int | None], named: Mapping[str, int] | None = None
) -> FimTokens | None:
    """Return the fill-in-the-middle tokens of a vocabulary; None if it has no markers of prefix and suffix.

    `named`: ids that the model's file names, by field of `FimTokens`; they take precedence.
    """
    family = next((texts for texts in _FAMILIES if all(token_to_id(text) is not None for text in texts)), ())
    found = dict(zip(("prefix", "suffix", "middle"), map(token_to_id, family), strict=False))
    for role, texts in (("repository", _REPOSITORIES), ("file", _FILES)):
        found[role] = next((token_id for text in texts if (token_id := token_to_id(text)) is not None), None)
    ids = {**{role: token_id for role, token_id in found.items() if token_id is not None}, **(named or {})}
    if "prefix" not in ids or "suffix" not in ids:
        return None
    others = {token_id for text in _ENDINGS if (token_id := token_to_id(text)) is not None}
    is_suffix_first = not _SUFFIX_FIRST.isdisjoint(family)
    return FimTokens(**ids, suffix_first=is_suffix_first, endings=frozenset(others.union(ids.values())))


# --- The result -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer with its special tokens and chat templates.

    Fields:
        backend: a `tokenizers.Tokenizer` or `SentencePieceBackend`, which adds BOS and EOS if the model needs them.
        bos_token_id, eos_token_id: None where the model has none.
        template_variables: names that chat templates may use, such as `bos_token`, with their text.
        chat_templates: Jinja2 sources by name; "default" is used unless a request names another.
        fim: tokens of the fill-in-the-middle format; None if the model has none.
        end_token_ids: tokens that the files name as ends beside EOS.
    """

    backend: Any
    bos_token_id: int | None
    eos_token_id: int | None
    template_variables: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    fim: FimTokens | None = None
    end_token_ids: frozenset[int] = frozenset()


@contextmanager
def library_errors(failure: str) -> Iterator[None]:
    """Raise ModelFileError for an error of the tokenizers library, and for a panic, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):
            raise
        raise ModelFileError(f"{failure}: {problem_of(error)}; fetch the model again") from None


def add_bos_and_eos(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `backend` put these tokens around each text; None adds nothing. Mutates: `backend`."""
    single, used = ["$A"], []
    # Named by role: the template's own syntax cannot hold every token's text.
    for role, token in (("bos", bos), ("eos", eos)):
        if token is not None:
            single.insert(0 if role == "bos" else len(single), role)
            used.append({"id": role, "ids": [backend.token_to_id(token)], "tokens": [token]})
    backend.post_processor = processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=used)


# --- Pre-tokenization rules of byte-level BPE vocabularies, by their names in llama.cpp -----------
# A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) and does not contain it; a wrong one gives wrong tokens
# without any error. A name that is not in this table is refused; the rules are those of the tokenizers that the
# models were trained with.

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK_CASED = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 "
    "1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
    "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 "
    "2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A "
    "10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""Letters with two cases as DeepSeek-V2's tokenizer lists them, which are fewer than Unicode has now."""
_DEEPSEEK_LETTERS = "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in _DEEPSEEK_CASED.split())
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """Rules of one name.

    Fields:
        splits: regular expressions applied in turn; each match, and each text between matches, is a piece.
        ignore_merges: a piece that is a token is taken whole, without merging.
        adds_bos: texts begin with BOS if the file does not specify it.
        composes: text is normalised to Unicode NFC first.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False


_GPT2_RULES = PreTokenization((_GPT2,))
_SINGLE_DIGITS = PreTokenization((r"\p{N}", _GPT2))
_LLAMA3_RULES = PreTokenization((_LLAMA3,), ignore_merges=True, adds_bos=True)
_CL100K_RULES = PreTokenization((_LLAMA3,))
_QWEN2_RULES = PreTokenization((_QWEN2,), composes=True)
_GPT4O_RULES = PreTokenization((_GPT4O,))

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "default": PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenization((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_RULES,
    "phi-2": _GPT2_RULES,
    "olmo": PreTokenization((_GPT2,), composes=True),  # GPT-NeoX's, which OLMo has
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama3": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "llama-bpe": _LLAMA3_RULES,
    "lfm2": _LLAMA3_RULES,
    "pixtral": _LLAMA3_RULES,
    "smaug-bpe": _CL100K_RULES,
    "dbrx": _CL100K_RULES,
    "glm4": _CL100K_RULES,
    "chatglm-bpe": _CL100K_RULES,
    "qwen2": _QWEN2_RULES,
    "deepseek-r1-qwen": PreTokenization((_QWEN2,)),
    "qwen35": PreTokenization((_QWEN35,), composes=True),
    "tekken": PreTokenization((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": _GPT4O_RULES,
    "llama4": _GPT4O_RULES,
    "deepseek-llm": PreTokenization(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenization((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3": PreTokenization((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
}


def find_pre_tokenization(name: str) -> PreTokenization:
    """Return the rules of `name`. Raises: UnsupportedModelError."""
    rules = PRE_TOKENIZATIONS.get(name)
    if rules is None:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is '{name}', which is not supported{nearest(name, PRE_TOKENIZATIONS)}: text would be "
            f"cut wrongly; use the model's Hugging Face directory, whose tokenizer.json contains the rules"
        )
    return rules


def build_byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], rules: PreTokenization, *, adds_space: bool = False
) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer without added tokens. Raises: ModelFileError for merges outside `vocab`.

    `adds_space`: before text that begins with none; before each piece where Transformers does so.
    """
    check_merges(vocab, merges)
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if rules.composes:
        backend.normalizer = normalizers.NFC()
    # GPT-2's rules are the library's own, which adds the space before it splits.
    is_whole = adds_space and rules.splits == (_GPT2,)
    splits = [pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated") for split in rules.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=is_whole)
    backend.pre_tokenizer = pre_tokenizers.Sequence([byte_level] if is_whole else [*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def check_merges(vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Raise ModelFileError unless both sides and the result of each merge are tokens.

    The tokenizers library panics on some of these.
    """
    for index, (left, right) in enumerate(merges):
        if left not in vocab or right not in vocab or left + right not in vocab:
            missing = next(piece for piece in (left, right, left + right) if piece not in vocab)
            raise ModelFileError(
                f"merge {index} of {len(merges)} ({left!r} + {right!r}) needs the token {missing!r}, which is not "
                f"among the {len(vocab)} tokens; the file is corrupted, fetch it again"
            )


# --- Tokens that end a turn or a text, by their texts ---------------------------------------------
# Configurations often name one end of several, or a wrong one; llama.cpp collects ends by their texts too. Only added
# tokens count, which no ordinary text becomes.

_MARKERS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<end_of_turn>", "<turn|>",
    "<|tool_response>", "<|END_OF_TURN_TOKEN|>", "<|EOT|>", "[|endofturn|]", "<end_of_utterance>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
_NAMES = frozenset({"</s>", "<eos>", "<EOT>", "▁<EOT>", "[EOT]", "[EOS]", "[e~["})
"""Ends if they are special. Elsewhere they are text: Gemma has `</s>` as a tag of HTML."""
_PART_END = "<|end|>"
_PARTED = frozenset({"<|return|>", "<|flush|>"})
"""Ends of formats whose turns have several parts (gpt-oss, Solar Open); `_PART_END` then ends a part alone."""


def find_end_tokens(added: Mapping[str, int], special: frozenset[int]) -> frozenset[int]:
    """Return the ends among added tokens, given by text; `special`: those that mark structure."""
    found = {text: added[text] for text in _MARKERS if text in added}
    found |= {text: added[text] for text in _NAMES if added.get(text) in special}
    if not _PARTED.isdisjoint(found):
        found.pop(_PART_END, None)
    return frozenset(found.values())
