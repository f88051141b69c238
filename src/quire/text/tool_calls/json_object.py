"""`JsonObject`: follows one JSON object character by character, and tells its own keys and values from what is in them.

Keeps no text. Each character costs the same, whatever came before. Next to read: `parser.py`.
"""

import enum
import re

MAX_DEPTH = 256
PLAIN_TEXT = re.compile(r'[^"\\\x00-\x1f]+')
"""What may be passed over within a string."""


class Mark(enum.Enum):
    """What a character was."""

    INSIDE = "nothing of note"
    BAD = "not JSON"
    KEY_ENDS = "the quote after one of the object's own keys"
    VALUE_STARTS = "the first character of one of its own values"
    VALUE_ENDS = "the last one, except of a number"
    OBJECT_ENDS = "the object's last brace"


class _Expects(enum.Enum):
    OPENING = enum.auto()
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    LITERAL = enum.auto()
    NUMBER = enum.auto()


_BLANKS = " \t\n\r"
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_DIGITS = "0123456789"
# Where a number is, and what each character makes of it.
_NUMBER: dict[str, dict[str, str]] = {
    "sign": {"0": "zero", **dict.fromkeys("123456789", "integer")},
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "integer": {**dict.fromkeys(_DIGITS, "integer"), ".": "point", "e": "exponent", "E": "exponent"},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {**dict.fromkeys(_DIGITS, "fraction"), "e": "exponent", "E": "exponent"},
    "exponent": {**dict.fromkeys(_DIGITS, "power"), "+": "power sign", "-": "power sign"},
    "power sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
_WHOLE_NUMBERS = frozenset({"zero", "integer", "fraction", "power"})


class JsonObject:
    """Call `advance` with each character. After BAD or OBJECT_ENDS it is of no further use."""

    def __init__(self) -> None:
        self._expects = _Expects.OPENING
        self._stack: list[str] = []
        self._is_key = False
        self._left = ""
        self._num_hex = 0
        self._number = ""

    @property
    def is_in_string(self) -> bool:
        """Whether `PLAIN_TEXT` may be passed over now."""
        return self._expects is _Expects.STRING

    def advance(self, character: str) -> Mark:
        """Take one character."""
        expects = self._expects
        if expects is _Expects.STRING:
            return self._in_string(character)
        if expects is _Expects.NUMBER:
            after = _NUMBER[self._number].get(character)
            if after is not None:
                self._number = after
                return Mark.INSIDE
            if self._number not in _WHOLE_NUMBERS:
                return Mark.BAD
            self._expects = expects = _Expects.COMMA_OR_END
        elif expects is _Expects.LITERAL:
            return self._in_literal(character)
        elif expects is _Expects.ESCAPE:
            return self._in_escape(character)
        elif expects is _Expects.HEX:
            return self._in_hex(character)
        if character in _BLANKS:
            return Mark.BAD if expects is _Expects.OPENING else Mark.INSIDE
        return self._structure(character, expects)

    def _structure(self, character: str, expects: _Expects) -> Mark:
        if expects is _Expects.COMMA_OR_END:
            if character == ",":
                self._expects = _Expects.KEY if self._stack[-1] == "{" else _Expects.VALUE
                return Mark.INSIDE
            return self._close(character)
        if expects is _Expects.VALUE:
            return self._start_value(character)
        if expects is _Expects.VALUE_OR_END:
            return self._close(character) if character == "]" else self._start_value(character)
        if expects is _Expects.COLON:
            self._expects = _Expects.VALUE
            return Mark.INSIDE if character == ":" else Mark.BAD
        if expects is _Expects.OPENING:
            return self._open(character) if character == "{" else Mark.BAD
        if character == '"':
            self._expects, self._is_key = _Expects.STRING, True
            return Mark.INSIDE
        return self._close(character) if expects is _Expects.KEY_OR_END else Mark.BAD

    def _start_value(self, character: str) -> Mark:
        mark = Mark.VALUE_STARTS if len(self._stack) == 1 else Mark.INSIDE
        if character == '"':
            self._expects, self._is_key = _Expects.STRING, False
        elif character in "{[":
            if self._open(character) is Mark.BAD:
                return Mark.BAD
        elif character in _LITERALS:
            self._expects, self._left = _Expects.LITERAL, _LITERALS[character]
        elif character == "-" or character in _DIGITS:
            self._expects = _Expects.NUMBER
            self._number = "sign" if character == "-" else _NUMBER["sign"][character]
        else:
            return Mark.BAD
        return mark

    def _open(self, character: str) -> Mark:
        if len(self._stack) == MAX_DEPTH:
            return Mark.BAD
        self._stack.append(character)
        self._expects = _Expects.KEY_OR_END if character == "{" else _Expects.VALUE_OR_END
        return Mark.INSIDE

    def _close(self, character: str) -> Mark:
        if character != ("}" if self._stack[-1] == "{" else "]"):
            return Mark.BAD
        self._stack.pop()
        return self._end_value() if self._stack else Mark.OBJECT_ENDS

    def _end_value(self) -> Mark:
        self._expects = _Expects.COMMA_OR_END
        return Mark.VALUE_ENDS if len(self._stack) == 1 else Mark.INSIDE

    def _in_string(self, character: str) -> Mark:
        if character == '"':
            if not self._is_key:
                return self._end_value()
            self._expects = _Expects.COLON
            return Mark.KEY_ENDS if len(self._stack) == 1 else Mark.INSIDE
        if character == "\\":
            self._expects = _Expects.ESCAPE
        return Mark.BAD if character < " " else Mark.INSIDE

    def _in_escape(self, character: str) -> Mark:
        if character == "u":
            self._expects, self._num_hex = _Expects.HEX, 4
            return Mark.INSIDE
        self._expects = _Expects.STRING
        return Mark.INSIDE if character in '"\\/bfnrt' else Mark.BAD

    def _in_hex(self, character: str) -> Mark:
        self._num_hex -= 1
        if self._num_hex == 0:
            self._expects = _Expects.STRING
        return Mark.INSIDE if character in _HEX else Mark.BAD

    def _in_literal(self, character: str) -> Mark:
        if character != self._left[0]:
            return Mark.BAD
        self._left = self._left[1:]
        return Mark.INSIDE if self._left else self._end_value()
