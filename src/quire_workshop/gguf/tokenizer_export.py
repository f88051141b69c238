"""`describe_tokenizer`: a directory's tokenizer as the keys of a GGUF file.

The opposite of `quire/text/gguf_tokenizer.py`. llama.cpp knows pre-tokenizers by name only: the name is the one whose
rules cut sample texts as tokenizer.json does, and both tokenizers must give the same ids for the samples.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quire.errors import ModelError, ModelFileError, UnsupportedModelError
from quire.text.directory_tokenizer import build_directory_tokenizer
from quire.text.gguf_tokenizer import build_gguf_tokenizer
from quire.text.tokenizer_parts import PRE_TOKENIZATIONS, build_byte_level, library_errors

SAMPLES = (
    "The quick brown fox doesn't jump; it's 12345678 o'clock, I'LL go.  Two   spaces\tand\ttabs\n\n\nthree lines\r\n",
    "def add(first, second):\n    return first + second  # f(x) = x² ≥ 3,141.59\n\n\tprint(add(1, 22))!!??  ",
    "Größe Brücke ça naïve café İstanbul Привет мир مرحبا بالعالم हिन्दी ไทย e\u0301 ﬁ½ⅣⅫ６",
    "你好，世界。今天天气很好。こんにちは世界カタカナー 안녕하세요 세계 🦙👩‍👩‍👧🇩🇪1️⃣ “q” — …\u00a0\u3000\u200d",
    "camelCaseWord HTTPServer ABC123def __init__ /usr/bin $100 <tag>a</tag> {x: [1, 2]} ~`^|+=*& 'S 'm've\n \n  x",
)
_ORDINARY, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


@library_errors("the tokenizer cannot be written to a GGUF file")
def describe_tokenizer(
    path: Path, vocab_size: int, end_ids: Sequence[int] = (), *, has_merges: bool = False
) -> dict[str, Any]:
    """Return the keys `tokenizer.…` of the model directory `path`. `end_ids`: every token that ends a turn.

    `has_merges`: SentencePiece's merges are written too, as Gemma 4 has them, not only scores that they follow from.

    Raises: ModelFileError; UnsupportedModelError for a tokenizer that GGUF cannot hold with the same results.
    """
    parts = build_directory_tokenizer(path)
    backend = parts.backend
    model: Mapping[str, Any] = json.loads(backend.to_str())["model"]
    if model.get("type") != "BPE":
        raise UnsupportedModelError(
            f"{path}: the tokenizer is {model.get('type')}; GGUF files are written for BPE only"
        )
    vocab = backend.get_vocab(with_added_tokens=True)
    if max(vocab.values()) >= vocab_size:
        raise ModelFileError(f"{path}: the tokenizer has {max(vocab.values()) + 1:,} tokens, the model {vocab_size:,}")
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, index in vocab.items():
        tokens[index], types[index] = token, _ORDINARY
    for index, added in backend.get_added_tokens_decoder().items():
        types[index] = _CONTROL if added.special else _USER_DEFINED
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if model.get("byte_fallback"):
        keys |= _sentencepiece(backend, model, tokens, types, merges)
        keys |= {"tokenizer.ggml.model": "gemma4"} if has_merges else {}
    else:
        keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _pre_tokenizer(path, backend, model)}
    if has_merges or not model.get("byte_fallback"):
        keys["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in merges]
    keys["tokenizer.ggml.token_type"] = types
    keys |= _unknown_and_padding(parts.template_variables, vocab)
    # What surrounds a text; the check below finds a template that adds more than one token.
    ids, inner = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    before = next((index for index in range(len(ids)) if ids[index : index + len(inner)] == inner), 0)
    bos_id = ids[0] if before and parts.bos_token_id is None else parts.bos_token_id
    if bos_id is not None:
        keys["tokenizer.ggml.bos_token_id"] = bos_id
    ends = list(dict.fromkeys([*([] if parts.eos_token_id is None else [parts.eos_token_id]), *end_ids]))
    for name, token_id in zip(("eos", "eot", "eom"), ends, strict=False):
        keys[f"tokenizer.ggml.{name}_token_id"] = token_id
    keys["tokenizer.ggml.add_bos_token"] = before > 0
    keys["tokenizer.ggml.add_eos_token"] = before + len(inner) < len(ids)
    if template := parts.chat_templates.get("default"):
        keys["tokenizer.chat_template"] = template
    _check(path, backend, keys)
    return keys


def _unknown_and_padding(roles: Mapping[str, str], vocab: Mapping[str, int]) -> dict[str, int]:
    """Return the keys of the tokens that have these roles."""
    found = {"unknown": vocab.get(roles.get("unk_token", "")), "padding": vocab.get(roles.get("pad_token", ""))}
    return {f"tokenizer.ggml.{name}_token_id": index for name, index in found.items() if index is not None}


def _pre_tokenizer(path: Path, backend: tokenizers.Tokenizer, model: Mapping[str, Any]) -> str:
    def pieces(of: tokenizers.Tokenizer) -> list[list[str]]:
        texts = [of.normalizer.normalize_str(text) if of.normalizer else text for text in SAMPLES]
        return [[piece for piece, _ in of.pre_tokenizer.pre_tokenize_str(text)] for text in texts]

    if backend.pre_tokenizer is not None:
        wanted = pieces(backend)
        for name, rules in PRE_TOKENIZATIONS.items():
            same_merging = rules.ignore_merges == bool(model.get("ignore_merges"))
            if same_merging and pieces(build_byte_level({}, [], rules)) == wanted:
                return name
    raise UnsupportedModelError(
        f"{path}: tokenizer.json cuts text as none of the pre-tokenizers does that GGUF has names for here; use "
        "llama.cpp's convert_hf_to_gguf.py, then quantise the result"
    )


def _sentencepiece(
    backend: tokenizers.Tokenizer, model: Mapping[str, Any], tokens: list[str], types: list[int], merges: list[Any]
) -> dict[str, Any]:
    """Scores in the order of the merges. Mutates: types."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(merges) + index)) for index, token in enumerate(tokens)]
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = _BYTE
        elif token == model.get("unk_token"):
            types[index] = _UNKNOWN
    normalizer = json.dumps(json.loads(backend.to_str()).get("normalizer"))
    pre_tokenizer = json.dumps(json.loads(backend.to_str()).get("pre_tokenizer"))
    has_prefix = '"Prepend"' in normalizer or '"prepend_scheme": "first"' in pre_tokenizer
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }


def _check(path: Path, backend: tokenizers.Tokenizer, keys: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError unless the tokenizer of the keys encodes the samples as the directory's does."""
    try:
        found = build_gguf_tokenizer(keys).backend
    except ModelError as error:
        raise UnsupportedModelError(f"{path}: GGUF cannot hold this tokenizer: {error}") from error
    for text in SAMPLES:
        if any(
            found.encode(text, add_special_tokens=adds).ids != backend.encode(text, add_special_tokens=adds).ids
            for adds in (True, False)
        ):
            raise UnsupportedModelError(
                f"{path}: as GGUF the tokenizer would give other ids for {text[:30]!r}; use llama.cpp's converter"
            )
