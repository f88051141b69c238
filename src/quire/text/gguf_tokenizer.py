"""A tokenizer from the metadata of a GGUF file (`tokenizer.ggml.*`).

Three kinds: "gpt2", byte-level BPE with merges in the file; "llama", SentencePiece BPE with merges that follow from
the tokens' scores; "gemma4", SentencePiece BPE with merges in the file. Keys, token types and defaults are
llama.cpp's; the rules that cut text are those of the models' original tokenizers (`tokenizer_parts.py`). Must not
know: GGUF's binary layout, tensors, the engine.
Next to read: `tokenizer_parts.py`, `tokenizer.py`.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import tokenizers
from tokenizers import decoders

from quire._native import Pieces
from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.text.tokenizer_parts import (
    PreTokenization,
    TokenizerParts,
    add_bos_and_eos,
    build_byte_level,
    check_merges,
    find_end_tokens,
    find_fim_tokens,
    find_pre_tokenization,
)

_log = logging.getLogger(__name__)

_ORDINARY, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Token types of the format; 5 is an unused one."""
_MARKED = frozenset((_UNKNOWN, _CONTROL, _USER_DEFINED))
"""Types of tokens that are matched whole."""
_NO_PIECES = frozenset((_UNKNOWN, _CONTROL, _BYTE))
"""Types of tokens that no merge makes."""
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
    token_types = found.token_type or [_ORDINARY] * len(found.tokens)
    marked = [index for index, token_type in enumerate(token_types) if token_type in _MARKED]
    ends = _ends(found, token_types, marked)
    ids = {
        "bos_token": found.bos_token_id,
        "eos_token": ends[0],
        "unk_token": found.unknown_token_id,
        "pad_token": found.padding_token_id,
    }
    if found.model == "llama":
        # Defaults of SentencePiece models, for older files.
        for name, default in (("unk_token", 0), ("bos_token", 1)):
            ids[name] = ids[name] if ids[name] is not None or default >= len(found.tokens) else default
    rules = _pre_tokenization(found.pre) if found.model == "gpt2" else None
    added = _added_tokens(found.tokens, token_types, marked, ids)
    around = _around(found, ids, adds_bos=rules is None or rules.adds_bos)
    variables = {name: found.tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    backend: tokenizers.Tokenizer | SentencePieceBackend
    if rules is not None:
        backend = build_byte_level(_vocabulary(found.tokens), _merges(found), rules)
        backend.add_tokens(list(added.values()))
        if around != (None, None):
            bos, eos = (None if token_id is None else found.tokens[token_id] for token_id in around)
            add_bos_and_eos(backend, bos=bos, eos=eos)
    elif found.model in ("llama", "gemma4"):
        backend = _build_sentencepiece(found, token_types, added, ids["unk_token"], around)
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is '{printable(found.model)}'; supported are 'gpt2' (byte-level BPE), 'llama' and "
            "'gemma4' (SentencePiece BPE)"
        )
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
    if not found.tokens:
        raise ModelFileError("the file's tokenizer is damaged (tokenizer.ggml.tokens is empty); get another conversion")
    for name in ("token_type", "scores"):
        values = getattr(found, name)
        if values is not None and len(values) < num_tokens:
            raise ModelFileError(f"tokenizer.ggml.{name} has {len(values)} entries for {num_tokens} tokens")
    return found


def _ends(found: _Metadata, token_types: list[int], marked: list[int]) -> list[int | None]:
    """Return EOS, the end of a turn and that of a message; None for a piece of text, as some files name.

    It stays where no other token is an end by its text.
    """
    ends = [found.eos_token_id, found.eot_token_id, found.eom_token_id]
    special = frozenset(index for index in marked if token_types[index] == _CONTROL)
    known = find_end_tokens({found.tokens[index]: index for index in marked}, special)
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


# --- SentencePiece BPE in native code, with the used methods of `tokenizers.Tokenizer` ------------
# It has the same ids as the tokenizers library. That needs 515,000 merges for 262,144 pieces, which take seconds to
# make; `native/text/pieces.cpp` finds them in the vocabulary as it meets them.

NO_PIECE = float("nan")
"""Score of a token that takes no part in merges."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text."""

    ids: list[int]


class SentencePieceBackend:
    """Encodes text. Thread-safe. `decoder`: as the library's, by which `byte_decoding` recognises the kind."""

    def __init__(
        self,
        tokens: Sequence[str],
        scores: list[float],
        added: Mapping[int, tokenizers.AddedToken],
        unknown_id: int | None,
        *,
        marks_start: bool,
        around: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """`added`: tokens that are matched whole. `marks_start`: "▁" comes before each text between them. `around`: BOS
        and EOS of each text. Raises: ValueError for a token that is there twice."""
        self._tokens, self._added = list(tokens), dict(added)
        unknown = -1 if unknown_id is None else unknown_id
        self._pieces = Pieces(self._tokens, scores, list(added), unknown, marks_start)
        bos, eos = around
        self._before = [] if bos is None else [bos]
        self._after = [] if eos is None else [eos]
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        self.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if marks_start else steps)

    def set_merges(self, lines: list[str]) -> int:
        """Make "left right" the only merges. Returns the number of the first bad one, or how many there are."""
        return self._pieces.set_merges(lines)

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Encoded:
        """Return the ids of a text, or of two without anything around. Raises: UnicodeEncodeError."""
        ids = self._pieces.encode(text)
        if pair is not None:
            return Encoded(ids + self._pieces.encode(pair))
        return Encoded([*self._before, *ids, *self._after] if add_special_tokens else ids)

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoded]:
        """Return the ids of several texts."""
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token."""
        found = self._pieces.find(token)
        return None if found < 0 else found

    def id_to_token(self, token_id: int) -> str | None:
        """Return the text of a token; None for one outside the vocabulary or without a text."""
        return (self._tokens[token_id] or None) if 0 <= token_id < len(self._tokens) else None

    def get_vocab(self, *, with_added_tokens: bool = True) -> dict[str, int]:
        """Return the ids of all tokens, which hold the added ones."""
        return {token: token_id for token_id, token in enumerate(self._tokens) if token}

    def get_vocab_size(self) -> int:
        """Return how many tokens have a text."""
        return len(self._tokens) - self._tokens.count("")

    def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """Return the tokens that are matched whole."""
        return self._added


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


def _build_sentencepiece(
    found: _Metadata,
    token_types: list[int],
    added: Mapping[int, tokenizers.AddedToken],
    unknown_id: int | None,
    around: tuple[int | None, int | None],
) -> SentencePieceBackend:
    has_merges = found.model == "gemma4"
    if not has_merges and found.scores is None:
        raise _missing("scores")
    scores = [
        NO_PIECE if token_type in _NO_PIECES else score
        for score, token_type in zip(found.scores or [0.0] * len(token_types), token_types, strict=True)
    ]
    marks_start = found.add_space_prefix and not has_merges
    try:
        backend = SentencePieceBackend(found.tokens, scores, added, unknown_id, marks_start=marks_start, around=around)
    except ValueError:
        _vocabulary(found.tokens)  # names the token that is there twice
        raise
    if has_merges:
        if found.merges is None:
            raise _missing("merges")
        if backend.set_merges(found.merges) < len(found.merges):
            check_merges(_vocabulary(found.tokens), _merges(found))  # says what is wrong
    return backend


# --- Tokens outside the model -----------------------------------------------------------------


def _added_tokens(
    tokens: list[str], token_types: list[int], marked: list[int], ids: Mapping[str, int | None]
) -> dict[int, tokenizers.AddedToken]:
    """Return control and user-defined tokens, which are matched whole; control tokens are special."""
    special_ids = {token_id for name, token_id in ids.items() if token_id is not None and name != "pad_token"}
    special_ids |= {index for index in marked if token_types[index] != _USER_DEFINED}
    return {
        index: tokenizers.AddedToken(tokens[index], special=index in special_ids, normalized=False)
        for index in sorted(special_ids.union(marked))
        if tokens[index]
    }


def _around(found: _Metadata, ids: Mapping[str, int | None], *, adds_bos: bool) -> tuple[int | None, int | None]:
    """Return BOS and EOS as far as they are added to each text."""
    added: list[int | None] = []
    for name, flag, default in (("bos", found.add_bos_token, adds_bos), ("eos", found.add_eos_token, False)):
        token_id = ids[f"{name}_token"]
        if flag and token_id is None:
            _log.warning("tokenizer.ggml.add_%s_token is true, but the file has no such token: none is added", name)
        added.append(token_id if (default if flag is None else flag) else None)
    return added[0], added[1]


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
