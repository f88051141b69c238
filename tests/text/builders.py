"""Small tokenizers for tests: trained in a moment with the tokenizers library, and described as GGUF metadata."""

import atexit
import functools
from collections.abc import Mapping
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from quire.text.tokenizer import Tokenizer, load_tokenizer_gguf
from quire.text.tokenizer_parts import TokenizerParts

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog doesn't mind; the fox's gone.",
    "def add(first, second):\n    return first + second  # 12345 and 67\n\n\nprint(add(1, 22))",
    "Ein süßer Bär fährt über die Brücke. Ça va bien, merci à toi, naïve façade!",
    "你好，世界。今天天气很好。こんにちは世界。 안녕하세요 세계. Привет, мир! مرحبا بالعالم",
    "emoji 🦙🦙 👩‍👩‍👧 🇩🇪 1️⃣ … “quotes” — dashes\t\ttabs\r\nlines   spaces    more",
] * 3
SPECIAL_TOKENS = ["<|end|>", "<|user|>"]
FRAGMENTS = [
    *["the", " fox", "'s", "'LL", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "12", " 345", "６", "Ⅳ", "½", "a.b"],
    *["é", "e\u0301", "ß", "İ", "ﬁ", "\u200d", "\u00a0", "\u3000", "\ufeff", "▁", "Ġ", "<0x0A>", "你好", "안녕", "🦙"],
    *["👩‍👩‍👧", "🇩🇪", "\x00", "\x7f", "\x85", "\u2028", "\ufffd", "\U0010ffff", "<|end|>", "<|user|>", "<|", "|>"],
]
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=12).map("".join),
)


@functools.cache
def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2's kind, 600 tokens; the two special tokens come first."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level_metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """Return the same vocabulary as GGUF metadata. `changes`: keys below `tokenizer.ggml.`; None removes one."""
    backend = byte_level_backend()
    state = backend.model.__getstate__()
    merges = [" ".join(merge) for merge in _json(state)["merges"]]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    return ggml(
        {
            "model": "gpt2",
            "pre": pre,
            "tokens": tokens,
            "token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
            "merges": merges,
            "eos_token_id": 0,
            **changes,
        }
    )


@functools.cache
def sentencepiece_pieces() -> tuple[tuple[str, float, int], ...]:
    """Llama 2's kind: (piece, score, type), learned merges first, then single characters, as SentencePiece orders."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, limit_alphabet=70, show_progress=False))
    merged = list(dict.fromkeys("".join(merge) for merge in _json(trained.model.__getstate__())["merges"]))
    characters = [token for token in trained.get_vocab() if len(token) == 1]
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(piece, float(-rank), 1) for rank, piece in enumerate(merged + sorted(characters))]
    return tuple(pieces)


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


def sentencepiece_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of the same metadata, with its merges written out; no BOS or EOS is added."""
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens, types = keys["tokens"], keys["token_type"]
    pieces = [index for index, kind in enumerate(types) if kind not in (2, 3, 6)]
    if "merges" in keys:
        merges = [(left, right) for left, _, right in (line.partition(" ") for line in keys["merges"])]
    else:
        merges = merges_from_scores({tokens[index]: keys["scores"][index] for index in pieces})
    unknown_id = keys.get("unknown_token_id")
    vocab = {token: index for index, token in enumerate(tokens) if token}
    unknown = None if unknown_id is None else tokens[unknown_id]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = keys.get("add_space_prefix", True) and "merges" not in keys
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = {keys.get(f"{name}_token_id") for name in ("bos", "eos", "unknown")}
    special |= {index for index, kind in enumerate(types) if kind in (2, 3)}
    backend.add_tokens([
        tokenizers.AddedToken(token, special=index in special, normalized=False)
        for index, token in enumerate(tokens) if token and (index in special or types[index] == 4)
    ])  # fmt: skip
    return backend


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of `sentencepiece_pieces`."""
    tokens, scores, types = (list(column) for column in zip(*sentencepiece_pieces(), strict=True))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return ggml({"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, **ids, **changes})


def ggml(entries: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    return load_tokenizer_gguf(byte_level_metadata())


@functools.cache
def sentencepiece_tokenizer() -> Tokenizer:
    return load_tokenizer_gguf(sentencepiece_metadata())


# Names of test modules outlive the last garbage collection, and nanobind would report the tokenizer as leaked.
atexit.register(sentencepiece_tokenizer.cache_clear)


@functools.cache
def word_piece_tokenizer() -> Tokenizer:
    """Return a tokenizer whose decoder does not work byte by byte."""
    words = ["[UNK]", "un", "##believ", "##able", "the", "fox", ",", "!", "é", "##é", "🦙", "[SEP]"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(TokenizerParts(backend=backend, bos_token_id=None, eos_token_id=11))


def _json(state: bytes) -> dict[str, Any]:
    import json

    return json.loads(state)
