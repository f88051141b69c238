"""`TextLogprobs`: which tokens' log-probabilities belong to which part of a text that calls of tools were read from.

A message has those of every token with a character in it, so that they cover its text; those of a call, of its markers
and of the blanks around it belong to nothing. Next to read: `response_output.py`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.text.detokenizer import IncrementalDetokenizer

Entry = dict[str, Any]
"""The log-probabilities at one position, as the API writes them."""


@dataclass(slots=True)
class _Tokens:
    """Tokens that together end with a whole character, from place `start` of the text up to `end`."""

    start: int
    end: int
    entries: list[Entry]


class TextLogprobs:
    """Finds entries by places in the text, in characters. Each is given out once, with the first part that it is of.

    The tokens are detokenised once more for it, as the engine did: their text may come later than they do.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        """detokenizer: at the end of the prompt, with the request's own settings."""
        self._detokenizer = detokenizer
        self._waiting: deque[_Tokens] = deque()
        """In order; the end of the last is open while its text is a part of a character."""
        self._num_chars = 0
        self._is_open = False
        self._taken_end = 0

    def add(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> None:
        """Take note of new tokens and what belongs to each."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            if not self._is_open:
                self._waiting.append(_Tokens(self._num_chars, self._num_chars, []))
            tokens = self._waiting[-1]
            tokens.entries.append(entry)
            self._num_chars += len(self._detokenizer.append(token_id))
            tokens.end = self._num_chars
            self._is_open = tokens.end == tokens.start

    def take(self, start: int, end: int) -> list[Entry]:
        """Those of the text from `start` up to `end`. What stands before it is forgotten."""
        self._taken_end = end
        found: list[Entry] = []
        # Of a character that never came the tokens stay open: `take_rest` has them.
        while len(self._waiting) > self._is_open and self._waiting[0].start < end:
            tokens = self._waiting.popleft()
            if tokens.end > start:
                found += tokens.entries
        return found

    def take_rest(self, text_len: int) -> list[Entry]:
        """Those behind a text of `text_len` characters, if its last part was taken: a token that ended it, or a stop
        string that was cut off.
        """
        if self._taken_end < text_len:
            return []
        return [entry for tokens in self._waiting for entry in tokens.entries]
