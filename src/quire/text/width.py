"""`display_width`: the columns that a text takes on a terminal, where Chinese characters take two."""

import unicodedata


def display_width(text: str) -> int:
    """Return the number of columns."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
