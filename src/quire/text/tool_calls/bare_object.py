"""`BareObject`: translates an object with bare keys and quoted strings, as Gemma 4 writes it, to JSON.

    {city:<|"|>Ulm<|"|>,days:3,parts:[{at:null}]}   →   {"city": "Ulm", "days": 3, "parts": [{"at": null}]}

Strings stand between two equal markers and have no escapes. Must not know tools. Next to read: `parser.py`.
"""

import json
import re
from collections.abc import Generator
from typing import Any

from quire.text.stop_strings import begun_len

_NON_BLANK = re.compile(r"\S")
_KEY_END = re.compile(r"[:,{}\[\]<]")
_VALUE_END = re.compile(r"[,}\]<]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_CLOSERS = {"{": "}", "[": "]"}
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}

Reading = Generator[None, None, Any]
"""Reads text from where the reader before it stopped, and yields when it needs more."""


class BareObject:
    """Reads one object that begins with the first text. `is_done`: at its end, or where it is none; then `is_whole`."""

    def __init__(self, quote: str) -> None:
        self.is_done, self.is_whole = False, False
        self._quote = quote
        self._text, self._position, self._is_ended = "", 0, False
        self._written: list[str] = []
        self._reading: Reading = self._read()

    def feed(self, text: str, *, ends: bool) -> tuple[str, int]:
        """Return the JSON of the next text, and how many characters of it were read.

        Call it again with the others and those that follow, unless `is_done`. `ends`: none follow.
        """
        self._text, self._position, self._is_ended = text, 0, ends
        next(self._reading, None)
        written, self._written = "".join(self._written), []
        return written, self._position

    def _read(self) -> Reading:
        self.is_whole = yield from self._read_object()
        self.is_done = True

    def _read_object(self) -> Reading:
        """Return True at the end of the object. Without recursion: models may nest as deep as they like."""
        closers: list[str] = []
        has_item = follows_comma = False
        while character := (yield from self._skip_blanks()):
            if closers and character == closers[-1]:
                self._write(closers.pop(), size=1)
                if not closers:
                    return True
                has_item, follows_comma = True, False
            elif character == "," and has_item and not follows_comma:
                self._position += 1
                follows_comma = True
            elif has_item != follows_comma:
                return False
            else:
                if has_item:
                    self._write(", ")
                if closers and closers[-1] == "}":
                    if not (yield from self._read_key()):
                        return False
                    character = yield from self._skip_blanks()
                has_item, follows_comma = character not in _CLOSERS, False
                if not has_item:
                    closers.append(_CLOSERS[character])
                    self._write(character, size=1)
                elif not closers or not (yield from self._read_value()):
                    return False
        return False

    def _read_key(self) -> Reading:
        if (yield from self._is_at_quote()):
            if not (yield from self._read_string()):
                return False
        else:
            key = (yield from self._take_until(_KEY_END)).strip()
            if not key:
                return False
            self._write(json.dumps(key, ensure_ascii=False))
        if (yield from self._skip_blanks()) != ":":
            return False
        self._write(": ", size=1)
        return True

    def _read_value(self) -> Reading:
        """Read a string, a number, true, false or null; other text without quotes is a string too."""
        if (yield from self._is_at_quote()):
            return (yield from self._read_string())
        text = (yield from self._take_until(_VALUE_END)).strip()
        if not text:
            return False
        self._write(text if _NUMBER.fullmatch(text) else _WORDS.get(text) or json.dumps(text, ensure_ascii=False))
        return True

    def _read_string(self) -> Reading:
        """Pass a string on as it arrives. Return False if the text ends in it."""
        self._write('"', size=len(self._quote))
        while True:
            found = self._text.find(self._quote, self._position)
            held = 0 if self._is_ended else begun_len(self._text, self._quote, self._position)
            end = found if found >= 0 else len(self._text) - held
            self._write(json.dumps(self._text[self._position : end], ensure_ascii=False)[1:-1])
            self._position = end
            if found >= 0:
                self._write('"', size=len(self._quote))
                return True
            if self._is_ended:
                return False
            yield

    def _write(self, text: str, *, size: int = 0) -> None:
        """Write JSON in place of the next `size` characters."""
        self._written.append(text)
        self._position += size

    def _skip_blanks(self) -> Reading:
        """Return the next character that is no blank; "" at the end of the text."""
        while (match := _NON_BLANK.search(self._text, self._position)) is None:
            self._position = len(self._text)
            if self._is_ended:
                return ""
            yield
        self._position = match.start()
        return match[0]

    def _is_at_quote(self) -> Reading:
        """Return True if the text goes on with a quote; waits while it may."""
        while not self._text.startswith(self._quote, self._position):
            if self._is_ended or not self._quote.startswith(self._text[self._position :]):
                return False
            yield
        return True

    def _take_until(self, pattern: re.Pattern[str]) -> Reading:
        """Return the text up to a character that matches, or to the end of the text."""
        taken: list[str] = []
        while (match := pattern.search(self._text, self._position)) is None:
            taken.append(self._text[self._position :])
            self._position = len(self._text)
            if self._is_ended:
                return "".join(taken)
            yield
        taken.append(self._text[self._position : match.start()])
        self._position = match.start()
        return "".join(taken)
