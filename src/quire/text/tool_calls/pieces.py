"""`Pieces`: text that arrives in parts, for readers that stop wherever it ends.

A reader is a generator that yields when it needs more text. Must not know formats. Next to read: `parser.py`.
"""

import re
from collections.abc import Callable, Generator
from typing import Any

Reading = Generator[None, None, Any]
"""Reads text from where the reader before it stopped, and yields when it needs more."""


class Pieces:
    """The text that is not read yet.

    `position` is that of the next character in `text`, `offset` the place of `text` in the whole; `is_ended`: no more
    text follows.
    """

    def __init__(self) -> None:
        self.text, self.position, self.offset, self.is_ended = "", 0, 0, False

    @property
    def is_empty(self) -> bool:
        """Return True if all text has been read."""
        return self.position == len(self.text)

    def add(self, text: str) -> None:
        """Take the next piece; what was read is dropped."""
        self.offset += self.position
        self.text, self.position = self.text[self.position :] + text, 0

    def take(self, num_characters: int) -> str:
        """Return the next characters, as many as there are."""
        taken = self.text[self.position : self.position + num_characters]
        self.position += len(taken)
        return taken

    def until(self, pattern: re.Pattern[str], give: Callable[[str], None]) -> Reading:
        """Give the text up to a character that matches, and return that; "" at the end of the text."""
        while (match := pattern.search(self.text, self.position)) is None:
            give(self.take(len(self.text)))
            if self.is_ended:
                return ""
            yield
        give(self.take(match.start() - self.position))
        return match[0]

    def is_at(self, marker: str) -> Reading:
        """Return True if the text goes on with `marker`; waits while it may."""
        while (found := self.text[self.position : self.position + len(marker)]) != marker:
            if self.is_ended or not marker.startswith(found):
                return False
            yield
        return True
