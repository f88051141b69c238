"""A tokenizer from the metadata of a GGUF file (`tokenizer.ggml.*`).

Two kinds: "gpt2", byte-level BPE with merges in the file, and "llama", SentencePiece BPE with merges that follow from
the tokens' scores. Keys, token types and defaults are llama.cpp's; the rules that cut text are those of the models'
original tokenizers (`pre_tokenization.py`). Must not know: GGUF's binary layout, tensors, the engine.
Next to read: `pre_tokenization.py`, `tokenizer.py`.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tokenizers
from tokenizers import decoders, models, normalizers

from quire.errors import ModelFileError, UnsupportedModelError
from quire.text.pre_tokenization import PreTokenization, build_byte_level, find_pre_tokenization
from quire.text.tokenizer_parts import TokenizerParts, add_bos_and_eos

_log = logging.getLogger(__name__)

_Kind = TypeVar("_Kind")
_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Token types of the format; 1 is an ordinary token, 5 an unused one."""
_VARIABLE_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build the tokenizer that `metadata` describes.

    Raises: ModelFileError for missing, contradictory or out-of-range entries; UnsupportedModelError for a kind of
        tokenizer or pre-tokenizer that is not implemented.
    """
    kind = _required(metadata, "model", str)
    tokens = _strings(metadata, "tokens")
    vocab = _vocabulary(tokens)
    token_types = _numbers(metadata, "token_type", len(tokens)) or [1] * len(tokens)
    ids = {name: _token_id(metadata, key, len(tokens)) for name, key in _VARIABLE_KEYS.items()}
    if kind == "gpt2":
        rules = _pre_tokenization(metadata)
        backend = build_byte_level(vocab, _merges(metadata), rules)
        adds_bos = rules.adds_bos
    elif kind == "llama":
        # Defaults of SentencePiece models, for older files.
        for name, default in (("unk_token", 0), ("bos_token", 1), ("eos_token", 2)):
            ids[name] = ids[name] if ids[name] is not None or default >= len(tokens) else default
        scores = _numbers(metadata, "scores", len(tokens))
        if scores is None:
            raise _missing("scores")
        backend = _build_sentencepiece(metadata, tokens, vocab, token_types, scores, ids["unk_token"])
        adds_bos = True
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is '{kind}'; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)"
        )
    _add_added_tokens(backend, tokens, token_types, ids)
    variables = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    _add_bos_and_eos(backend, metadata, variables, adds_bos=adds_bos)
    return TokenizerParts(
        backend=backend,
        bos_token_id=ids["bos_token"],
        eos_token_id=ids["eos_token"],
        template_variables=variables,
        chat_templates=_chat_templates(metadata),
    )


# --- The two kinds ----------------------------------------------------------------------------


def _pre_tokenization(metadata: Mapping[str, Any]) -> PreTokenization:
    name = metadata.get(_KEY + "pre")
    if name is None:
        _log.warning(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre), using 'default': text may be cut into "
            "other tokens than in training; a newer conversion of the model has the name"
        )
        name = "default"
    if not isinstance(name, str):
        raise _wrong_type("pre", name, "a string")
    return find_pre_tokenization(name)


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for index, line in enumerate(_strings(metadata, "merges")):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise ModelFileError(f"tokenizer.ggml.merges[{index}] is {line[:40]!r}, not two pieces and a space between")
        merges.append((left, right))
    return merges


def _build_sentencepiece(
    metadata: Mapping[str, Any],
    tokens: list[str],
    vocab: dict[str, int],
    token_types: list[float],
    scores: list[float],
    unknown_id: int | None,
) -> tokenizers.Tokenizer:
    adds_space = metadata.get(_KEY + "add_space_prefix", True)
    ordinary = {
        token: score
        for token, score, token_type in zip(tokens, scores, token_types, strict=True)
        if token_type not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    model = models.BPE(
        vocab=vocab,
        merges=merges_from_scores(ordinary),
        unk_token=None if unknown_id is None else tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if adds_space else [replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
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
    backend: tokenizers.Tokenizer, tokens: list[str], token_types: list[float], ids: Mapping[str, int | None]
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
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], variables: Mapping[str, str], *, adds_bos: bool
) -> None:
    added: dict[str, str | None] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        flag = metadata.get(f"{_KEY}add_{name}_token")
        token = variables.get(f"{name}_token")
        if flag and token is None:
            raise ModelFileError(
                f"tokenizer.ggml.add_{name}_token is true but there is no tokenizer.ggml.{name}_token_id"
            )
        added[name] = token if (default if flag is None else flag) else None
    if any(added.values()):
        add_bos_and_eos(backend, bos=added["bos"], eos=added["eos"])


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {"default": metadata[prefix]} if prefix in metadata else {}
    templates |= {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(prefix + ".")}
    for name, text in templates.items():
        if not isinstance(text, str):
            raise ModelFileError(f"the chat template '{name}' is {type(text).__name__}, not a string")
    return templates


# --- Reading the metadata ---------------------------------------------------------------------


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    # Some files pad the list with empty strings: ids of no text.
    vocab = {token: index for index, token in enumerate(tokens) if token}
    if len(vocab) < len(tokens) - tokens.count(""):
        first = next(index for index, token in enumerate(tokens) if token and vocab[token] != index)
        raise ModelFileError(
            f"tokenizer.ggml.tokens has {tokens[first]!r} twice, at {first} and {vocab[tokens[first]]}"
        )
    return vocab


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    value = metadata.get(f"{_KEY}{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
        raise ModelFileError(
            f"tokenizer.ggml.{name}_token_id is {value!r}, but the file has the {num_tokens} tokens 0..{num_tokens - 1}"
        )
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = _required(metadata, name, list)
    if not all(isinstance(value, str) for value in values):
        raise _wrong_type(name, values, "a list of strings")
    return values


def _numbers(metadata: Mapping[str, Any], name: str, length: int) -> list[float] | None:
    values = metadata.get(_KEY + name)
    if values is None:
        return None
    values = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    if not all(isinstance(value, (int, float)) for value in values):
        raise _wrong_type(name, values, "a list of numbers")
    if len(values) != length:
        raise ModelFileError(f"tokenizer.ggml.{name} has {len(values)} entries for {length} tokens")
    return values


def _required(metadata: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    value = metadata.get(_KEY + name)
    if value is None:
        raise _missing(name)
    if not isinstance(value, kind):
        raise _wrong_type(name, value, f"a {kind.__name__}")
    return value


def _missing(name: str) -> ModelFileError:
    return ModelFileError(f"the file has no tokenizer.ggml.{name}, which its tokenizer needs; get another conversion")


def _wrong_type(name: str, value: Any, wanted: str) -> ModelFileError:
    return ModelFileError(f"tokenizer.ggml.{name} is {type(value).__name__}, not {wanted}; the file is corrupted")
