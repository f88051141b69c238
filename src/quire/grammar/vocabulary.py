"""`Vocabulary`: the tokens that grammars choose from, as bytes.

Must not know: where tokens come from. Next to read: `compiler.py`.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import llguidance

_SPECIAL = b"\xff"
"""First byte of a special token: no UTF-8 text has it."""
_BORDER = b"\xff"
_MAX_SEARCHES = 64


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens by id.

    Fields:
        tokens: the bytes of each token; b"" for an unused id. As many as the model has logits.
        special_token_ids: tokens without text. Grammars allow none of them except stop tokens.
        eos_token_ids: tokens that end a text; at least one.
        encode: the model's tokenizer, for parts of a text that the grammar determines.
    """

    tokens: Sequence[bytes]
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]

    @functools.cached_property
    def library_tokenizer(self) -> "llguidance.LLTokenizer":
        """Return the vocabulary for llguidance: takes 0.1 s and 20 MB for 49,152 tokens."""
        import llguidance

        eos_token_ids = list(self.eos_token_ids)
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_LibraryVocabulary(self)), n_vocab=len(self.tokens), eos_token=eos_token_ids
        )

    def containing(self, part: bytes) -> list[int]:
        """Return the tokens that contain these bytes, ascending."""
        return self._find(re.escape(part))

    def equal_to(self, raw: bytes) -> list[int]:
        """Return the tokens with exactly these bytes, ascending."""
        return self._find(_BORDER + re.escape(raw) + b"(?=%b)" % _BORDER)

    def continuing(self, text: bytes) -> list[int]:
        """Return the tokens that begin with this text or are beginnings of it, ascending."""
        beginnings = b"|".join(re.escape(text[:size]) for size in range(len(text) - 1, 0, -1))
        rest = b"|(?:%b)(?=%b)" % (beginnings, _BORDER) if beginnings else b""
        return self._find(_BORDER + b"(?:%b%b)" % (re.escape(text), rest))

    def spell(self, raw: bytes) -> list[int]:
        """Return tokens with exactly these bytes, special tokens among them, as the tokenizer would.

        Fewer, if the vocabulary lacks a byte.
        """
        ids = _encoded(self.encode, raw)
        if b"".join([self.tokens[token_id] for token_id in ids]) == raw:
            return ids
        known = {token: index for index, token in enumerate(self.tokens) if token and token in raw}
        return _longest_first(raw, known, len(raw))

    def _find(self, pattern: bytes) -> list[int]:
        """Return the tokens with a match of `pattern`; a token stands between two borders."""
        found = self._found.get(pattern)
        if found is None:
            joined, starts = self._joined
            ends = [match.end() - 1 for match in re.finditer(pattern, joined, re.DOTALL)]
            found = np.unique(np.searchsorted(starts, ends, side="right") - 1).tolist()
            if len(self._found) == _MAX_SEARCHES:
                self._found.clear()
            self._found[pattern] = found
        return found

    @functools.cached_property
    def _found(self) -> dict[bytes, list[int]]:
        """Results of `_find`, since each takes some 3 ms for 150,000 tokens, and a model has few markers."""
        return {}

    @functools.cached_property
    def _joined(self) -> tuple[bytes, npt.NDArray[np.int64]]:
        """All tokens in one text, and the place of each."""
        sizes = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens)) + 1
        return _BORDER + _BORDER.join(self.tokens) + _BORDER, np.cumsum(sizes) - sizes + 1


class _LibraryVocabulary:
    """A tokenizer with the attributes that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = vocabulary.special_token_ids | set(vocabulary.eos_token_ids)
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(special)
        self.tokens = [_SPECIAL + raw if index in special else raw for index, raw in enumerate(vocabulary.tokens)]
        self._encode = vocabulary.encode
        self._ids = {raw: index for index, raw in enumerate(self.tokens) if raw}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens with exactly these bytes: those of the tokenizer if they match, else the longest first."""
        raw = text if isinstance(text, bytes) else text.encode()
        ids = _encoded(self._encode, raw)
        # A tokenizer may read a special token out of the text, or put a space before it.
        if b"".join([self.tokens[token_id] for token_id in ids]) == raw:
            return ids
        return _longest_first(raw, self._ids, self._longest)


def _encoded(encode: Callable[[str], Sequence[int]], raw: bytes) -> list[int]:
    """Return the tokenizer's tokens; none for part of a character, or text that the tokenizer refuses."""
    try:
        return list(encode(raw.decode()))
    except Exception:
        return []


def _longest_first(raw: bytes, known: Mapping[bytes, int], longest: int) -> list[int]:
    """Return tokens with these bytes, or with its first ones if no token has a byte."""
    ids, start = [], 0
    while start < len(raw):
        for stop in range(min(len(raw), start + longest), start, -1):
            if (token_id := known.get(raw[start:stop])) is not None:
                ids.append(token_id)
                break
        else:
            break  # llguidance continues with the tokens so far
        start = stop
    return ids
