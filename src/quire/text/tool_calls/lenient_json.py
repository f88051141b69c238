"""`read_value`: JSON with the slips that models make, Python's literals, and the object notation of Gemma.

    {'city': 'Ulm', "days": 3, on: True,}                      →   {"city": "Ulm", "days": 3, "on": true}
    {city:<|"|>Ulm<|"|>,days:3}   (quote `<|"|>`)              →   {"city": "Ulm", "days": 3}

Brackets may be missing: their number is returned. Not read: strings without an end, other words, more than 64 levels.
Must not know tools or formats. Next to read: `readers.py`.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 64
WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_BLANKS = re.compile(r"\s*")
_STRING = re.compile(
    r'"""(?P<long>.*?)"""|"(?P<double>(?:[^"\\]++|\\.)*+)"|\'(?P<single>(?:[^\'\\]++|\\.)*+)\'', re.DOTALL
)
_WORD = re.compile(r"-?[\w.+-]+", re.ASCII)
_KEY = re.compile(r"[\w.$-]+")
_GEMMA_KEY = re.compile(r"[^\s:,{}\[\]<](?:[^:,{}\[\]<]*[^\s:,{}\[\]<])?")
_BARE = re.compile(r"[^,{}\[\]\n]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_ESCAPE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))", re.DOTALL
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


class NotReadableError(ValueError):
    """The text is no value, not even with slips."""


class Bare(str):
    """A scalar that a model wrote without quotes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Read:
    """A value, the place behind it, and the number of its objects and lists without a closing bracket."""

    value: Any
    end: int
    num_open: int


def read_value(text: str, start: int = 0, end: int | None = None, *, quote: str = "") -> Read:
    """Return the value that begins at `start`, behind blanks.

    `quote`: marker on both sides of a string; scalars without it are then `Bare`. Raises: NotReadableError.
    """
    reader = _Reader(text, start, len(text) if end is None else end, quote)
    return Read(reader.value(0), reader.position, reader.num_open)


def parse_json(text: str) -> tuple[Any, bool]:
    """Return the value of a whole text and whether it is strictly JSON; the text itself if it is no value."""
    try:
        value = json.loads(text)
        return (value, True) if dump_json(value) is not None else (text, False)
    except (ValueError, RecursionError):
        pass
    try:
        read = read_value(text)
    except NotReadableError:
        return text, False
    is_whole = isinstance(read.value, dict | list) and not read.num_open and not text[read.end :].strip()
    return (read.value if is_whole else text), False


def dump_json(value: Any) -> str | None:
    """Return a value as JSON; None if JSON or UTF-8 has no such value."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, RecursionError):
        return None
    return written


class _Reader:
    def __init__(self, text: str, start: int, end: int, quote: str) -> None:
        self._text, self.position, self._end, self._quote = text, start, end, quote
        self._key_pattern = _GEMMA_KEY if quote else _KEY
        self.num_open = 0

    def value(self, depth: int) -> Any:
        """Read a value. Raises: NotReadableError."""
        character = self._next()
        if character in _CLOSERS:
            if depth == MAX_DEPTH:
                raise NotReadableError("nested too deep")
            self.position += 1
            return self._object(depth + 1) if character == "{" else self._list(depth + 1, _CLOSERS[character])
        if self._is_string():
            return self._string()
        if self._quote:
            return Bare(self._take(_BARE).rstrip())
        return _scalar(self._take(_WORD))

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._next() != "}":
            if found and not self._takes_comma():
                self.num_open += 1
                return found
            if self._next() == "}":
                break
            before = self.position
            key = self._key()
            if key is None or self._next() != ":":
                # The next thing belongs to what is around this object.
                self.position = before
                self.num_open += 1
                return found
            self.position += 1
            found[key] = self.value(depth)
        self.position += 1
        return found

    def _list(self, depth: int, closer: str) -> list[Any]:
        found: list[Any] = []
        while (character := self._next()) != closer:
            if not character or (found and not self._takes_comma()):
                self.num_open += 1
                return found
            if self._next() == closer:
                break
            found.append(self.value(depth))
        self.position += 1
        return found

    def _takes_comma(self) -> bool:
        is_comma = self._text.startswith(",", self.position, self._end)
        self.position += is_comma
        return is_comma

    def _key(self) -> str | None:
        if self._is_string():
            return self._string()
        match = self._key_pattern.match(self._text, self.position, self._end)
        self.position = match.end() if match else self.position
        return match and match[0]

    def _is_string(self) -> bool:
        begins = self._text.startswith
        if self._quote and begins(self._quote, self.position, self._end):
            return True
        return begins('"', self.position, self._end) or (not self._quote and begins("'", self.position, self._end))

    def _string(self) -> str:
        if self._quote and self._text.startswith(self._quote, self.position, self._end):
            start = self.position + len(self._quote)
            end = self._text.find(self._quote, start, self._end)
            if end < 0:
                raise NotReadableError("a string has no end")
            self.position = end + len(self._quote)
            return self._text[start:end]
        match = _STRING.match(self._text, self.position, self._end)
        if match is None:
            raise NotReadableError("a string has no end")
        self.position = match.end()
        content: str = match[match.lastgroup or 0]
        if "\\" not in content:
            return content
        # JSON writes other characters than Unicode's first 65,536 as two escapes.
        return _ESCAPE.sub(_unescaped, content).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.position, self._end)
        if match is None:
            raise NotReadableError("a value is missing")
        self.position = match.end()
        return match[0]

    def _next(self) -> str:
        """Skip blanks and return the next character; "" at the end."""
        match = _BLANKS.match(self._text, self.position, self._end)
        self.position = match.end() if match else self.position
        return self._text[self.position] if self.position < self._end else ""


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _ESCAPED.get(match[4], match[4])


def _scalar(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise NotReadableError(f"no value of JSON: {text[:20]!r}")
    try:
        return float(text) if match[1] or match[2] else int(text)
    except ValueError:  # more digits than Python reads
        raise NotReadableError("a number is too long") from None
