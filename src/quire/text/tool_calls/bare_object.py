"""`BareObject`: translates an object with bare keys and quoted strings, as Gemma 4 writes it, to JSON.

    {city:<|"|>Ulm<|"|>,days:3,parts:[{at:null}]}   →   {"city": "Ulm", "days": 3, "parts": [{"at": null}]}

Strings stand between two equal markers and have no escapes. Must not know tools. Next to read: `parser.py`.
"""

import json
import re
from collections.abc import Callable

from quire.text.stop_strings import begun_len
from quire.text.tool_calls.pieces import Pieces, Reading

_NON_BLANK = re.compile(r"\S")
_KEY_END = re.compile(r"[:,{}\[\]<]")
_VALUE_END = re.compile(r"[,}\]<]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_CLOSERS = {"{": "}", "[": "]"}
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}


class BareObject:
    """Reads one object from `pieces`, and gives its JSON to `write` as it arrives."""

    def __init__(self, pieces: Pieces, quote: str, write: Callable[[str], None]) -> None:
        self._pieces, self._quote, self._give = pieces, quote, write

    def read(self) -> Reading:
        """Return True at the end of the object, False where the text is none. Without recursion: models may nest as
        deep as they like."""
        closers: list[str] = []
        has_item = follows_comma = False
        while character := (yield from self._skip_blanks()):
            if closers and character == closers[-1]:
                self._write(closers.pop(), size=1)
                if not closers:
                    return True
                has_item, follows_comma = True, False
            elif character == "," and has_item and not follows_comma:
                self._pieces.position += 1
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
        if (yield from self._pieces.is_at(self._quote)):
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
        if (yield from self._pieces.is_at(self._quote)):
            return (yield from self._read_string())
        text = (yield from self._take_until(_VALUE_END)).strip()
        if not text:
            return False
        self._write(text if _NUMBER.fullmatch(text) else _WORDS.get(text) or json.dumps(text, ensure_ascii=False))
        return True

    def _read_string(self) -> Reading:
        """Pass a string on as it arrives. Return False if the text ends in it."""
        pieces = self._pieces
        self._write('"', size=len(self._quote))
        while True:
            found = pieces.text.find(self._quote, pieces.position)
            held = 0 if pieces.is_ended else begun_len(pieces.text, self._quote, pieces.position)
            text = pieces.take((found if found >= 0 else len(pieces.text) - held) - pieces.position)
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])
            if found >= 0:
                self._write('"', size=len(self._quote))
                return True
            if pieces.is_ended:
                return False
            yield

    def _write(self, text: str, *, size: int = 0) -> None:
        """Write JSON in place of the next `size` characters."""
        self._give(text)
        self._pieces.position += size

    def _skip_blanks(self) -> Reading:
        """Return the next character that is no blank; "" at the end of the text."""
        return (yield from self._pieces.until(_NON_BLANK, lambda _: None))

    def _take_until(self, pattern: re.Pattern[str]) -> Reading:
        """Return the text up to a character that matches, or to the end of the text."""
        taken: list[str] = []
        yield from self._pieces.until(pattern, taken.append)
        return "".join(taken)
