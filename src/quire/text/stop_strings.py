"""Search for stop strings in text that arrives in pieces.

Released text never contains the beginning of a stop string that may still be completed, so that a match can always be
cut off whole, wherever the pieces were cut. Knows strings only: no tokens, no tokenizer.
Next to read: `detokenizer.py`, which makes the pieces.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


class StopStringMatcher:
    """Releases text up to the first stop string.

    The match that ends earliest wins; of several that end at the same character, the first in `stop`. The result does
    not depend on how the text was cut.
    """

    def __init__(self, stop: tuple[str, ...], include_in_output: bool) -> None:
        """`stop` holds non-empty strings; `include_in_output` keeps the stop string at the end of the text."""
        self._stop = stop
        self._include_in_output = include_in_output
        self._first_characters = frozenset(pattern[0] for pattern in stop)
        self._held = ""
        self._done = False

    def append(self, delta: str) -> Released:
        """Take the next piece of text. After a match every piece is dropped."""
        if self._done:
            return Released("")
        if not self._held and self._first_characters.isdisjoint(delta):
            return Released(delta)
        text = self._held + delta
        ends = [
            (start + len(pattern), index)
            for index, pattern in enumerate(self._stop)
            if (start := text.find(pattern)) >= 0
        ]
        if ends:
            self.finish()
            end, index = min(ends)
            pattern = self._stop[index]
            return Released(text[: end if self._include_in_output else end - len(pattern)], pattern)
        released_len = len(text) - max(begun_len(text, pattern) for pattern in self._stop)
        self._held = text[released_len:]
        return Released(text[:released_len])

    def finish(self) -> str:
        """End the text and return what was held back because it might have begun a stop string."""
        held, self._held = self._held, ""
        self._done = True
        return held


def begun_len(text: str, pattern: str, start: int = 0) -> int:
    """Return how many characters at the end of `text[start:]` are a beginning of `pattern`, but not all of it."""
    longest = min(len(pattern) - 1, len(text) - start)
    return next((size for size in range(longest, 0, -1) if text.endswith(pattern[:size])), 0)
