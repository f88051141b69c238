"""`CallReader`: one tool call, a JSON object with a name and arguments, found by counting braces.

The object is held until it is certainly a call. If the name comes before the arguments, that is at the opening brace of
the arguments, which are then passed on as they arrive; otherwise the whole object is read by `json.loads` at its end.
Must not know the text around calls. Next to read: `parser.py`.
"""

import enum
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from quire.text.tool_calls.formats import ToolCallFormat

_STRUCTURE = re.compile(r'["{}:]|[^\s\w,\[\].+-]', re.ASCII)
"""Outside strings: a character that matters here, or one that JSON does not have."""
_STRING_END = re.compile(r'["\\]')
_KEY = re.compile(r'[{,]\s*"(\w+)"\s*(:\s*)?$')
"""A key at the end of a text, with or without its colon."""
_TAIL_LEN = 80
"""Characters that are searched for `_KEY`."""
_NESTING = {"{": 1, "}": -1, ":": 0}
_BLANKS = re.compile(r"\s*")


class Status(enum.Enum):
    """State of a call after a piece of text."""

    MORE = "the object goes on"
    DONE = "the object is complete, and a call"
    BAD = "this is no call, or no JSON any more"


@dataclass(slots=True)
class Read:
    """Result of reading one piece of text.

    Fields:
        position: of the first character that was not taken.
        name: of the call, with the piece that makes it certain that it is one.
        arguments: next pieces of the arguments.
    """

    position: int
    status: Status = Status.MORE
    name: str | None = None
    arguments: list[str] = field(default_factory=list)


class CallReader:
    """Reads one call from pieces of text. Its results do not depend on how the text was cut.

    Attributes:
        is_certain: the name was returned: this is a call, even if it breaks off.
        held: text that was taken and is neither name nor arguments yet.
    """

    def __init__(self, format: ToolCallFormat, tool_names: Collection[str] | None) -> None:
        self.is_certain = False
        self.held: list[str] = []
        self._format = format
        self._tool_names = tool_names
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._tail = ""
        self._may_stream = True
        self._is_streaming = False
        self._follows_arguments = False

    def read(self, text: str, position: int) -> Read:
        """Take characters from `position` on, up to the end of the object at most."""
        found = Read(position)
        start = index = position
        while index < len(text):
            if self._is_escaped:
                self._is_escaped = False
                index += 1
                continue
            if self._follows_arguments:
                index = _BLANKS.match(text, index).end()  # type: ignore[union-attr]
                if index == len(text):
                    break
                self._follows_arguments = False
                if text[index] not in ",}":  # a model may forget the object's own brace
                    found.position, found.status = index, Status.DONE
                    return found
            match = (_STRING_END if self._in_string else _STRUCTURE).search(text, index)
            if match is None:
                break
            index = match.end()
            if match[0] == "\\" and self._in_string:
                self._is_escaped = True
            elif match[0] == '"':
                self._in_string = not self._in_string
            elif self._depth > 1 and self._depth + _NESTING.get(match[0], -self._depth) > 1:
                self._depth += _NESTING[match[0]]
            else:
                # A closing brace belongs to what it closes; an opening one is the first character of what it opens.
                end = index if match[0] == "}" else index - 1
                self._take(text[start:end], found)
                start = end
                found.status = self._note(match[0], found)
                if found.status is not Status.MORE:
                    found.position = end
                    return found
        self._take(text[start:], found)
        found.position = len(text)
        return found

    def _take(self, piece: str, found: Read) -> None:
        if not piece:
            return
        if self._is_streaming:
            found.arguments.append(piece)
        else:
            self.held.append(piece)
            self._tail = (self._tail + piece[-_TAIL_LEN:])[-_TAIL_LEN:]

    def _note(self, character: str, found: Read) -> Status:
        """Follow one character of the structure. Mutates: `found`."""
        if character == "{":
            self._depth += 1
            is_good = self._depth != 2 or self._start_arguments(found)
        elif character == "}":
            self._depth -= 1
            if self._depth == 0:
                return self._end(found)
            if self._depth == 1 and self._is_streaming:
                self._is_streaming, self._follows_arguments = False, True
            is_good = True
        else:
            is_good = character == ":" and self._is_known_key()
        return Status.MORE if is_good else Status.BAD

    def _is_known_key(self) -> bool:
        """Return False at a key that shows that a text without markers is no call."""
        if self._depth != 1 or self.is_certain or self._format.needs_opening:
            return True
        key = _KEY.search(self._tail)
        return key is not None and key[1] in ("name", "id", "type", *self._format.argument_keys)

    def _start_arguments(self, found: Read) -> bool:
        """Begin to pass arguments on if the name is known. Returns False if it is not that of a tool."""
        key = _KEY.search(self._tail) if self._may_stream and not self.is_certain else None
        if key is None or key[2] is None or key[1] not in self._format.argument_keys:
            return True
        self._may_stream = False  # tried once per object, so that the time stays proportional to the text
        before = "".join(self.held)
        before = before[: before.rindex('"' + key[1] + '"')].rstrip().removesuffix(",")
        value = _loads(before + "}")
        if value is None or "name" not in value:
            return True
        name = value["name"]
        if not self._is_tool(name):
            return False
        self._give(name, found)
        self._is_streaming = True
        return True

    def _end(self, found: Read) -> Status:
        if not self.is_certain:
            value = _loads("".join(self.held)) or {}
            name, arguments = value.get("name"), self._arguments(value)
            if not self._is_tool(name) or arguments is None:
                return Status.BAD
            self._give(name, found)
            found.arguments.append(arguments)
        self.held.clear()
        return Status.DONE

    def _arguments(self, value: dict[str, Any]) -> str | None:
        """Arguments of a complete call as the text of a JSON object: they may be one, null, or text that holds one."""
        key = next((key for key in self._format.argument_keys if key in value), None)
        if key is None:
            # Between markers, or with the name of a tool, this is a call without arguments; otherwise it is any object.
            return "{}" if self._format.needs_opening or self._tool_names is not None else None
        arguments = value[key]
        if isinstance(arguments, str):
            arguments = _loads(arguments)
        elif arguments is None:
            return "{}"
        text = json.dumps(arguments, ensure_ascii=False)
        return text if isinstance(arguments, dict) and _is_unicode(text) else None

    def _give(self, name: str, found: Read) -> None:
        self.is_certain = True
        self.held.clear()
        found.name = name

    def _is_tool(self, name: Any) -> TypeGuard[str]:
        if not isinstance(name, str) or not name or not _is_unicode(name):
            return False
        return self._tool_names is None or name in self._tool_names


def _loads(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text, None if the text is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_unicode(text: str) -> bool:
    """Return False for halves of surrogate pairs, which JSON can name and UTF-8 cannot encode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
