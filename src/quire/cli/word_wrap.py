"""`WordWrap`: breaks the lines of an answer at words, while it comes piece by piece.

A terminal alone breaks at its last column, within words. Next to read: `output.py`.
"""

import re
from collections.abc import Callable

from quire.text.width import display_width

# Spaces, a line break, a character that a line may break beside (those of Chinese, Japanese and Korean), or a word.
_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
_PART = re.compile(rf"[^\S\n]+|\n|[{_WIDE}]|[^\s{_WIDE}]+")
_FENCE = "```"


class WordWrap:
    """Writes text in lines of at most `columns()`. A word is held until it ends; lines of code blocks stay whole."""

    def __init__(self, write: Callable[[str], None], columns: Callable[[], int]) -> None:
        self._write, self._columns = write, columns
        self._space = self._word = ""  # not written yet: the spaces before the word, and what there is of it
        self._used = 0  # columns of the line
        self._is_code = False

    def add(self, text: str) -> None:
        """Write the words that end in `text`."""
        for part in _PART.findall(text):
            if part.isspace():
                self._end_word()
                self._space += part
                if part == "\n":
                    self._write(self._space)
                    self._space, self._used = "", 0
            else:
                is_wide = len(part) == 1 and display_width(part) == 2
                if is_wide:
                    self._end_word()
                self._word += part
                if is_wide:
                    self._end_word()

    def end(self) -> None:
        """Write what is held."""
        self._end_word()
        self._write(self._space)
        self._used += len(self._space)
        self._space = ""

    def _end_word(self) -> None:
        if not self._word:
            return
        if not self._used and self._word.startswith(_FENCE):
            self._is_code = not self._is_code
        width = display_width(self._word)
        if self._used and not self._is_code and self._used + len(self._space) + width > self._columns():
            self._write("\n" + self._word)
            self._used = width
        else:
            self._write(self._space + self._word)
            self._used += len(self._space) + width
        self._space = self._word = ""
