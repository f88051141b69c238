"""`FimTokens`: the tokens of a model that mark prefix, suffix and middle of a text to fill in.

GGUF files may name them; in all others they are recognised by their text, as llama.cpp does. Must not know:
tokenizers, prompts. Next to read: `infill.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
