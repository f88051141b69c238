"""Finding stop strings in text that arrives in pieces.

The text released so far never contains the beginning of a stop string that may still be completed, so a match
can always be cut off whole, however the pieces were split. Knows strings only: no tokens, no tokenizer.
Next to read: `detokenizer.py`, which makes the pieces.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """What one piece made certain: text that may be shown, and the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


class StopStringMatcher:
    """Releases text up to the first stop string.

    The match that ends earliest wins; of several that end at the same character, the first in `stop`. The result
    depends only on the whole text, not on how it was split. Cost: proportional to the text, for any stop strings
    (Knuth, Morris and Pratt's automaton, one per stop string).
    """

    def __init__(self, stop: tuple[str, ...], include_in_output: bool) -> None:
        """`stop` holds non-empty strings; `include_in_output` keeps the stop string at the end of the text."""
        self._stop = stop
        self._include_in_output = include_in_output
        self._borders = [_borders(pattern) for pattern in stop]
        self._first_characters = frozenset(pattern[0] for pattern in stop)
        self._matched_lens = [0] * len(stop)
        self._held = ""
        self._done = False

    def append(self, delta: str) -> Released:
        """Take the next piece of text. After a match everything is dropped."""
        if self._done:
            return Released("")
        if not self._held and self._first_characters.isdisjoint(delta):
            return Released(delta)
        for offset, character in enumerate(delta):
            for index, pattern in enumerate(self._stop):
                if self._advance(index, character) == len(pattern):
                    return self._finish_with(pattern, self._held + delta[: offset + 1])
        text = self._held + delta
        released_len = len(text) - max(self._matched_lens)
        self._held = text[released_len:]
        return Released(text[:released_len])

    def finish(self) -> str:
        """The text has ended: return what was held back because it might have begun a stop string."""
        held, self._held = self._held, ""
        self._done = True
        return held

    def _advance(self, index: int, character: str) -> int:
        """Length of the longest beginning of stop string `index` that the text now ends with."""
        pattern, borders = self._stop[index], self._borders[index]
        matched_len = self._matched_lens[index]
        while matched_len and pattern[matched_len] != character:
            matched_len = borders[matched_len - 1]
        if pattern[matched_len] == character:
            matched_len += 1
        self._matched_lens[index] = matched_len
        return matched_len

    def _finish_with(self, pattern: str, text: str) -> Released:
        self._done = True
        self._held = ""
        return Released(text if self._include_in_output else text[: len(text) - len(pattern)], pattern)


def _borders(pattern: str) -> list[int]:
    """For each beginning of `pattern`: the length of its longest proper beginning that is also its end."""
    borders = [0] * len(pattern)
    border = 0
    for index in range(1, len(pattern)):
        while border and pattern[border] != pattern[index]:
            border = borders[border - 1]
        if pattern[border] == pattern[index]:
            border += 1
        borders[index] = border
    return borders
