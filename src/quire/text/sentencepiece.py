"""`SentencePieceBackend`: SentencePiece BPE in native code, with the methods of `tokenizers.Tokenizer` that are used.

It has the same ids as the tokenizers library. That needs 515,000 merges for 262,144 pieces, which take seconds to make;
`native/text/pieces.cpp` finds them in the vocabulary as it meets them. Must not know: files, models.
Next to read: `gguf_tokenizer.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders

from quire._native import Pieces

NO_PIECE = float("nan")
"""Score of a token that takes no part in merges."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text."""

    ids: list[int]


class SentencePieceBackend:
    """Encodes text. Thread-safe. `decoder`: as the library's, by which `token_bytes.py` recognises the kind."""

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
