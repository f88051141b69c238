"""`CallReader`: one call, a JSON object with a name and arguments, from its first brace to its last.

Decides from where on an object is certainly a call: when its name is known and the brace of its arguments is there.
Must not know what stands around calls. Next to read: `parser.py`.
"""

import enum
import json
from collections.abc import Collection
from dataclasses import dataclass, field

from quire.text.tool_calls.formats import ToolCallFormat
from quire.text.tool_calls.json_object import PLAIN_TEXT, JsonObject, Mark

_NAME = "name"
_OTHER_KEYS = frozenset({"id", "type"})
"""Keys that a call may have besides; in a text without markers any other says that it is no call."""


class Status(enum.Enum):
    """How far a call has come."""

    MORE = "the object goes on"
    DONE = "the object is complete, and a call"
    BAD = "this is no call, or no JSON any more"


@dataclass(slots=True)
class Read:
    """What a piece of text brought.

    Fields:
        position: of the first character that was not taken.
        name: of the call, with the piece that makes it certain that it is one.
        arguments: more of them.
    """

    position: int
    status: Status = Status.MORE
    name: str | None = None
    arguments: list[str] = field(default_factory=list)


class CallReader:
    """Reads one call from pieces of text. What comes out does not depend on how the text was cut.

    Attributes:
        is_certain: the name was given out: this is a call, even if it breaks off.
        held: text that was taken and has become neither name nor arguments.
    """

    def __init__(self, format: ToolCallFormat, tool_names: Collection[str] | None) -> None:
        self.is_certain = False
        self.held: list[str] = []
        self._format = format
        self._tool_names = tool_names
        self._object = JsonObject()
        self._recent: list[str] = []
        """Text since the last mark."""
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        """Complete arguments that wait for the name."""
        self._is_streaming = False

    @property
    def has_open_arguments(self) -> bool:
        """Whether arguments were given out that are not complete."""
        return self._is_streaming

    def read(self, text: str, position: int) -> Read:
        """Take characters from `position` on, up to the end of the object at most."""
        found = Read(position)
        start = index = position
        while index < len(text):
            if self._object.is_in_string and (plain := PLAIN_TEXT.match(text, index)) is not None:
                index = plain.end()
                continue
            mark = self._object.advance(text[index])
            if mark is not Mark.INSIDE:
                # The first character of a value belongs to it, the last one of a key or value too.
                is_before = mark is Mark.VALUE_STARTS or mark is Mark.BAD
                end = index if is_before else index + 1
                self._take(text[start:end], found)
                start = end
                found.status = self._note(mark, text[index], found)
                self._recent.clear()
                if found.status is not Status.MORE:
                    found.position = start
                    return found
            index += 1
        self._take(text[start:], found)
        found.position = len(text)
        return found

    def _take(self, piece: str, found: Read) -> None:
        if not piece:
            return
        if self._is_streaming:
            found.arguments.append(piece)
        else:
            self._recent.append(piece)
            self.held.append(piece)

    def _note(self, mark: Mark, character: str, found: Read) -> Status:
        if mark is Mark.BAD:
            return Status.BAD
        if mark is Mark.OBJECT_ENDS:
            return self._end(found)
        if self._is_streaming:
            self._is_streaming = False  # the only mark within arguments is their end
            return Status.MORE
        if self.is_certain:
            return Status.MORE
        if mark is Mark.KEY_ENDS:
            is_good = self._set_key()
        elif mark is Mark.VALUE_STARTS:
            is_good = self._start_value(character, found)
        else:
            is_good = self._set_value(found)
        return Status.MORE if is_good else Status.BAD

    def _set_key(self) -> bool:
        recent = "".join(self._recent)
        self._key = json.loads(recent[recent.index('"') :])
        known = self._key == _NAME or self._key in _OTHER_KEYS or self._key in self._format.argument_keys
        return known or self._format.needs_opening

    def _start_value(self, character: str, found: Read) -> bool:
        if self._key == _NAME:
            return character == '"'
        if self._key not in self._format.argument_keys or self._arguments is not None:
            return True
        if character == "{" and self._name is not None:
            self._is_streaming = True
            self._give(self._name, found)
        return character in '{"n'

    def _set_value(self, found: Read) -> bool:
        raw = "".join(self._recent)
        if self._key == _NAME:
            self._name = json.loads(raw)
            if not self._is_tool(self._name):
                return False
        elif self._key in self._format.argument_keys and self._arguments is None:
            self._arguments = _as_object(raw)
            if self._arguments is None:
                return False
        if self._name is not None and self._arguments is not None:
            self._give(self._name, found)
            found.arguments.append(self._arguments)
        return True

    def _end(self, found: Read) -> Status:
        # Between markers, or with the name of a tool, it is a call without arguments; elsewhere it may be anything.
        is_call = self._format.needs_opening or self._tool_names is not None
        if not self.is_certain and self._name is not None and is_call:
            self._give(self._name, found)
            found.arguments.append("{}")
        if self.is_certain:
            self.held.clear()
        return Status.DONE if self.is_certain else Status.BAD

    def _give(self, name: str, found: Read) -> None:
        self.is_certain = True
        self.held.clear()
        found.name = name

    def _is_tool(self, name: str | None) -> bool:
        if not name or not _is_unicode(name):
            return False
        return self._tool_names is None or name in self._tool_names


def _as_object(raw: str) -> str | None:
    """Arguments as the text of a JSON object: they may be one, null, or text that holds one."""
    if raw.startswith("{"):
        return raw
    if not raw.startswith('"'):
        return "{}"
    text: str = json.loads(raw).strip()
    return text if _is_unicode(text) and _is_object(text) else None


def _is_object(text: str) -> bool:
    followed = JsonObject()
    for index, character in enumerate(text):
        mark = followed.advance(character)
        if mark is Mark.BAD or mark is Mark.OBJECT_ENDS:
            return mark is Mark.OBJECT_ENDS and index == len(text) - 1
    return False


def _is_unicode(text: str) -> bool:
    """Without halves of surrogate pairs, which JSON can name and UTF-8 cannot hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
