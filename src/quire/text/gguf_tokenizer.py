"""A tokenizer from the metadata of a GGUF file (`tokenizer.ggml.*`).

Three kinds: "gpt2", byte-level BPE with merges in the file; "llama", SentencePiece BPE with merges that follow from
the tokens' scores; "gemma4", SentencePiece BPE with merges in the file. Keys, token types and defaults are
llama.cpp's; the rules that cut text are those of the models' original tokenizers (`pre_tokenization.py`). Must not
know: GGUF's binary layout, tensors, the engine.
Next to read: `pre_tokenization.py`, `tokenizer.py`.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import tokenizers
from tokenizers import decoders, models, normalizers

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.text.end_tokens import find_end_tokens
from quire.text.fim_tokens import find_fim_tokens
from quire.text.pre_tokenization import PreTokenization, build_byte_level, check_merges, find_pre_tokenization
from quire.text.tokenizer_parts import TokenizerParts, add_bos_and_eos

_log = logging.getLogger(__name__)

_ORDINARY, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Token types of the format; 5 is an unused one."""
_TEMPLATE_KEY = "tokenizer.chat_template"
_FIM_KEYS = {
    "prefix": "prefix", "suffix": "suffix", "middle": "middle",
    "fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle", "fim_rep": "repository", "fim_sep": "file",
}  # fmt: skip
"""Keys of fill-in-the-middle tokens → fields of `FimTokens`. The first three are those of older files."""
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", *_FIM_KEYS)
_DEFAULT_EOS = 2
"""Of SentencePiece models, for older files."""
_NO_TOKEN = (-1, 2**32 - 1)
"""Ids that stand for none."""


class _Metadata(msgspec.Struct, rename=lambda name: f"tokenizer.ggml.{name}"):
    """The keys that are read; the file need not have those with a default."""

    model: str
    tokens: list[str]
    token_type: list[int] | None = None
    scores: list[float] | None = None
    merges: list[str] | None = None
    pre: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    unknown_token_id: int | None = None
    padding_token_id: int | None = None
    prefix_token_id: int | None = None
    suffix_token_id: int | None = None
    middle_token_id: int | None = None
    fim_pre_token_id: int | None = None
    fim_suf_token_id: int | None = None
    fim_mid_token_id: int | None = None
    fim_rep_token_id: int | None = None
    fim_sep_token_id: int | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_space_prefix: bool = True


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build the tokenizer that `metadata` describes.

    Raises: ModelFileError for missing, contradictory or out-of-range entries; UnsupportedModelError for a kind of
        tokenizer or pre-tokenizer that is not implemented.
    """
    found = _read(metadata)
    vocab = _vocabulary(found.tokens)
    token_types = found.token_type or [_ORDINARY] * len(found.tokens)
    ends = _ends(found, token_types)
    ids = {
        "bos_token": found.bos_token_id,
        "eos_token": ends[0],
        "unk_token": found.unknown_token_id,
        "pad_token": found.padding_token_id,
    }
    if found.model == "gpt2":
        rules = _pre_tokenization(found.pre)
        backend = build_byte_level(vocab, _merges(found), rules)
        adds_bos = rules.adds_bos
    elif found.model == "gemma4":
        backend = _build_sentencepiece(found, vocab, _merges(found), ids["unk_token"], has_prefix=False)
        adds_bos = True
    elif found.model == "llama":
        # Defaults of SentencePiece models, for older files.
        for name, default in (("unk_token", 0), ("bos_token", 1)):
            ids[name] = ids[name] if ids[name] is not None or default >= len(found.tokens) else default
        merges = merges_from_scores(_ordinary(found, token_types))
        backend = _build_sentencepiece(found, vocab, merges, ids["unk_token"], has_prefix=found.add_space_prefix)
        adds_bos = True
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is '{printable(found.model)}'; supported are 'gpt2' (byte-level BPE), 'llama' and "
            "'gemma4' (SentencePiece BPE)"
        )
    _add_added_tokens(backend, found.tokens, token_types, ids)
    variables = {name: found.tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    _add_bos_and_eos(backend, found, variables, adds_bos=adds_bos)
    return TokenizerParts(
        backend=backend,
        bos_token_id=ids["bos_token"],
        eos_token_id=ids["eos_token"],
        end_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
        template_variables=variables,
        chat_templates=gguf_chat_templates(metadata),
        fim=find_fim_tokens(backend.token_to_id, _named_fim_tokens(found)),
    )


def _read(metadata: Mapping[str, Any]) -> _Metadata:
    """Read the keys. As llama.cpp does, leave out those that need not be there and make no sense, with a warning.

    Raises: ModelFileError for others, which would change tokens.
    """
    keys = dict(metadata)
    tokens = keys.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    for name in _ROLES:
        value = keys.get(key := f"tokenizer.ggml.{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < num_tokens):
            del keys[key]
            if value not in _NO_TOKEN:
                shown = printable(repr(value), limit=40)
                _log.warning("%s is %s, which is none of the file's %d tokens: left out", key, shown, num_tokens)
    for name in ("token_type", "scores"):
        values = keys.get(key := f"tokenizer.ggml.{name}")
        if isinstance(values, list) and len(values) > num_tokens > 0:
            _log.warning("%s has %d entries for %d tokens: the rest is left out", key, len(values), num_tokens)
            keys[key] = values[:num_tokens]
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        value = keys.get(key := f"tokenizer.ggml.{name}")
        if type(value) is int and value in (0, 1):
            _log.warning("%s is the number %d, not a boolean: read as %s", key, value, bool(value))
            keys[key] = bool(value)
    try:
        found = msgspec.convert(keys, _Metadata)
    except msgspec.ValidationError as error:
        problem = printable(str(error))
        raise ModelFileError(f"the file's tokenizer is damaged ({problem}); get another conversion") from None
    for name in ("token_type", "scores"):
        values = getattr(found, name)
        if values is not None and len(values) < num_tokens:
            raise ModelFileError(f"tokenizer.ggml.{name} has {len(values)} entries for {num_tokens} tokens")
    return found


def _ends(found: _Metadata, token_types: list[int]) -> list[int | None]:
    """Return EOS and the ends of turns and messages; None for a piece of text where another token is an end by its text.

    Some files have the EOS of another vocabulary.
    """
    ends = [found.eos_token_id, found.eot_token_id, found.eom_token_id]
    added = {
        token: index
        for index, (token, token_type) in enumerate(zip(found.tokens, token_types, strict=True))
        if token_type in (_CONTROL, _USER_DEFINED)
    }
    known = find_end_tokens(added, frozenset(index for index in added.values() if token_types[index] == _CONTROL))
    for place, token_id in enumerate(ends):
        if known and token_id is not None and token_types[token_id] == _ORDINARY:
            shown = printable(repr(found.tokens[token_id]), limit=40)
            _log.warning("the file names %s as the end of a text, which is ordinary text: left out", shown)
            ends[place] = None
    is_default = found.model == "llama" and len(found.tokens) > _DEFAULT_EOS and (not known or _DEFAULT_EOS in known)
    return [_DEFAULT_EOS, *ends[1:]] if ends[0] is None and is_default else ends


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    # Some files pad the list with empty strings: ids of no text.
    vocab = {token: index for index, token in enumerate(tokens) if token}
    if len(vocab) < len(tokens) - tokens.count(""):
        token = next(token for token, count in Counter(tokens).items() if token and count > 1)
        raise ModelFileError(f"tokenizer.ggml.tokens has {token!r} twice, at {tokens.index(token)} and {vocab[token]}")
    return vocab


# --- The kinds ----------------------------------------------------------------------------


def _pre_tokenization(name: str | None) -> PreTokenization:
    if name is None:
        _log.warning(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre), using 'default': text may be cut into "
            "other tokens than in training; a newer conversion of the model has the name"
        )
    return find_pre_tokenization(name or "default")


def _missing(name: str) -> ModelFileError:
    return ModelFileError(f"the file has no tokenizer.ggml.{name}, which its tokenizer needs; get another conversion")


def _merges(found: _Metadata) -> list[tuple[str, str]]:
    if found.merges is None:
        raise _missing("merges")
    merges = []
    for index, line in enumerate(found.merges):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise ModelFileError(f"tokenizer.ggml.merges[{index}] is {line[:40]!r}, not two pieces and a space between")
        merges.append((left, right))
    return merges


def _ordinary(found: _Metadata, token_types: list[int]) -> dict[str, float]:
    """Return the scores of the tokens that are pieces of text."""
    if found.scores is None:
        raise _missing("scores")
    return {
        token: score
        for token, score, token_type in zip(found.tokens, found.scores, token_types, strict=True)
        if token_type not in (_UNKNOWN, _CONTROL, _BYTE)
    }


def _build_sentencepiece(
    found: _Metadata, vocab: dict[str, int], merges: list[tuple[str, str]], unknown_id: int | None, *, has_prefix: bool
) -> tokenizers.Tokenizer:
    unknown = None if unknown_id is None else found.tokens[unknown_id]
    check_merges(vocab, merges)
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE vocabulary, the piece with the highest score first.

    Of several merges to the same piece, the longest left side is first, as in Hugging Face's conversion.
    """
    ranked = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((score, cut, len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


# --- Tokens outside the model -----------------------------------------------------------------


def _add_added_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], token_types: list[int], ids: Mapping[str, int | None]
) -> None:
    """Add control and user-defined tokens, which are matched whole; control tokens are special. Mutates: `backend`."""
    special_ids = {token_id for name, token_id in ids.items() if token_id is not None and name != "pad_token"}
    special_ids |= {index for index, token_type in enumerate(token_types) if token_type in (_UNKNOWN, _CONTROL)}
    added = [
        tokenizers.AddedToken(token, special=index in special_ids, normalized=False)
        for index, (token, token_type) in enumerate(zip(tokens, token_types, strict=True))
        if token and (index in special_ids or token_type == _USER_DEFINED)
    ]
    backend.add_tokens(added)


def _add_bos_and_eos(
    backend: tokenizers.Tokenizer, found: _Metadata, variables: Mapping[str, str], *, adds_bos: bool
) -> None:
    added: dict[str, str | None] = {}
    for name, flag, default in (("bos", found.add_bos_token, adds_bos), ("eos", found.add_eos_token, False)):
        token = variables.get(f"{name}_token")
        if flag and token is None:
            _log.warning("tokenizer.ggml.add_%s_token is true, but the file has no such token: none is added", name)
        added[name] = token if (default if flag is None else flag) else None
    if any(added.values()):
        add_bos_and_eos(backend, bos=added["bos"], eos=added["eos"])


def _named_fim_tokens(found: _Metadata) -> dict[str, int]:
    named = [(role, getattr(found, f"{key}_token_id")) for key, role in _FIM_KEYS.items()]
    return {role: token_id for role, token_id in named if token_id is not None}


def gguf_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the Jinja2 sources of a file's chat templates by name."""
    templates = {"default": metadata[_TEMPLATE_KEY]} if _TEMPLATE_KEY in metadata else {}
    prefix = f"{_TEMPLATE_KEY}."
    templates |= {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    for name in [name for name, text in templates.items() if not isinstance(text, str)]:
        _log.warning("the chat template '%s' is %s, not a string: left out", name, type(templates.pop(name)).__name__)
    return templates
