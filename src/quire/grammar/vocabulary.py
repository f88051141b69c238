"""`Vocabulary`: the tokens that grammars choose from, as bytes.

Must not know: where tokens come from. Next to read: `compiler.py`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance

_SPECIAL = b"\xff"
"""First byte of a special token: no UTF-8 text has it."""


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
        try:
            ids = list(self._encode(raw.decode()))
        except Exception:  # part of a character, or text that the tokenizer refuses
            ids = []
        # A tokenizer may read a special token out of the text, or put a space before it.
        if b"".join([self.tokens[token_id] for token_id in ids]) == raw:
            return ids
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(raw):
            for stop in range(min(len(raw), start + self._longest), start, -1):
                if (token_id := self._ids.get(raw[start:stop])) is not None:
                    ids.append(token_id)
                    break
            else:
                break  # no token has this byte: llguidance continues with the tokens so far
            start = stop
        return ids
