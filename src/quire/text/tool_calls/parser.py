"""`ToolCallParser`: splits generated text into content and tool calls while it is generated.

One parser for all formats (`formats.py`). Text that may begin a call is held back until that is certain; if it is no
call it becomes content, so that every character is returned, except for markers and blanks around calls. A call is
certain at the opening brace of its arguments if the name comes before them: the arguments are then passed on as they
arrive. Otherwise it is read by `json.loads` at its end. A call that breaks off stays a call: its arguments end where
the text stops being JSON, and the rest is content. The joined content, the calls and their arguments do not depend on
how the text was cut, and the time is proportional to its length. Never raises. Next to read: `formats.py`.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from quire.text.stop_strings import begun_len
from quire.text.tool_calls.bare_object import BareObject
from quire.text.tool_calls.formats import BARE_CALL, ToolCallFormat
from quire.text.tool_calls.pieces import Pieces, Reading
from quire.text.tool_calls.python_calls import python_calls
from quire.text.tool_calls.tagged_object import TaggedObject

_NON_BLANK = re.compile(r"\S")
_VALUE = re.compile(r"\S", re.ASCII)
_STRUCTURE = re.compile(r'["{}:]|[^\s\w,\[\].+-]', re.ASCII)
"""Outside strings: a character that matters here, or one that JSON does not have."""
_STRING_END = re.compile(r'["\\]')
_BRACES = re.compile(r'["{}]')
_NAME_END = re.compile(r"[^\w.-]")


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text outside calls. `start`: its position in the whole text, markers included, in characters."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Beginning of a call. `index` counts the calls of a text from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """Next piece of a call's arguments; joined, the pieces are the text of a JSON object."""

    index: int
    text: str


ToolEvent = ContentDelta | ToolCallStart | ToolArgumentsDelta


class ToolCallParser:
    """Reads one text: call `feed` with its pieces, then `finish`. `num_calls` counts the calls that have begun."""

    def __init__(
        self,
        format: ToolCallFormat,
        *,
        tool_names: Collection[str] | None = None,
        text_parameters: Mapping[str, Collection[str]] | None = None,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        """`tool_names`: a call of another name is content; None accepts any name. `text_parameters`: by tool, for
        formats that do not mark strings. `make_id` replaces the format's."""
        self.num_calls = 0
        self._format = format
        self._tool_names = tool_names
        self._text_parameters = text_parameters or {}
        self._make_id = make_id or format.make_id
        self._after_call, self._object = re.compile(rf"[^\s{format.separators}]"), re.compile(format.names_first)
        self._events: list[ToolEvent] = []
        self._pieces = Pieces()
        self._held: list[str] = []
        """Text before the next character that is content unless a call follows; arguments while these stream."""
        self._is_streaming = False
        self._follows_call = False
        """Only blanks have come since a call."""
        self._reading: Reading = self._read()

    def feed(self, text: str) -> list[ToolEvent]:
        """Take the next piece of text and return the events that are certain now."""
        self._pieces.add(text)
        next(self._reading, None)
        if self._is_streaming:
            self._give_arguments()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ToolEvent]:
        """End the text: what was held back is content, unless it only closes calls."""
        self._pieces.is_ended = True
        return self.feed("")

    # --- Parts of a text --------------------------------------------------------------------

    def _read(self) -> Reading:
        if self._format.needs_opening:
            while not self._pieces.is_ended:
                yield from self._read_content()
                yield from self._read_calls()
            return
        yield from self._hold_until(_NON_BLANK)
        if (yield from self._pieces.is_at(self._format.opening)):
            self._hold(len(self._format.opening))
        yield from self._read_calls()
        while True:  # no call can come any more
            self._hold_rest()
            self._release()
            yield

    def _read_content(self) -> Reading:
        """Release text up to the opening marker, and hold the marker, blanks and the marker of all calls before it."""
        pieces, marker, around = self._pieces, self._format.opening, self._format.around[0]
        while not pieces.is_ended:
            found = pieces.text.find(marker, pieces.position)
            begun = max(begun_len(pieces.text, item, pieces.position) for item in (marker, around) if item)
            end = found if found >= 0 else len(pieces.text) - begun
            body = pieces.text[pieces.position : end].rstrip().removesuffix(around).rstrip()
            if body:
                self._hold(len(body))
                self._release()
            self._hold(end - pieces.position)
            if found >= 0:
                self._hold(len(marker))
                return
            yield
        if self._follows_call and pieces.is_empty:
            self._held.clear()
        self._hold_rest()
        self._release()

    def _read_calls(self) -> Reading:
        """Read calls and lists of calls, and release what is none."""
        closing, around = self._format.closing, self._format.around[1]
        while True:
            character = yield from self._hold_until(_NON_BLANK)
            is_call = False
            if self._format.quote or self._format.tags:
                is_call = yield from self._read_bare_call()
            elif self._format.is_python:
                is_call = yield from self._read_python_calls()
            elif self._format.names_first:
                is_call = yield from self._read_named_call()
            elif character == "{":
                is_call = yield from self._read_call()
            elif character == "[":
                is_call = yield from self._read_list()
            if not is_call:
                self._release()
                return
            while True:
                yield from self._hold_until(self._after_call)
                if around and (yield from self._pieces.is_at(around)):
                    self._drop(len(around))
                    break
                if not closing or not (yield from self._pieces.is_at(closing)):
                    break
                self._drop(len(closing))
                if self._format.needs_opening and not around:
                    break
            if self._pieces.is_ended:  # blanks, separators and the beginning of a closing marker are no content
                self._hold_rest()
                self._held.clear()
                return
            if self._format.needs_opening:
                self._follows_call = True
                return

    def _read_list(self) -> Reading:
        """Return True if a call was in the list, and nothing else."""
        self._hold(1)
        num_calls = 0
        while character := (yield from self._hold_until(_NON_BLANK)):
            if character == "{":
                if not (yield from self._read_call()):
                    return False
                num_calls += 1
            elif num_calls and character == ",":
                self._hold(1)
            elif num_calls and character == "]":
                self._drop(1)
                return True
            else:
                return False
        return num_calls > 0

    def _read_call(self) -> Reading:
        """Read an object. Return False if it is no call or no JSON any more; the rest of it is then held."""
        first, depth = len(self._held), 0
        key_start: int | None = None
        is_certain, may_stream = False, True
        while True:
            character = yield from self._hold_until(_STRUCTURE)
            if character == '"':
                key_start = len(self._held)
                yield from self._hold_string()
            elif character == "{":
                depth += 1
                self._hold(1)
            elif character == "}":
                depth -= 1
                self._hold(1)
                if depth == 0:
                    return self._end_call(first, is_certain=is_certain)
                if depth == 1 and self._is_streaming:
                    self._end_streaming()
                    if (yield from self._hold_until(_NON_BLANK)) not in ",}":
                        self._held.clear()  # the model forgot the object's own brace
                        return True
            elif character == ":":
                key = None if key_start is None else "".join(self._held[key_start:]).strip()[1:-1]
                if depth == 1 and not is_certain and not self._may_be_key(key):
                    return False
                self._hold(1)
                begins_arguments = depth == 1 and may_stream and key in self._format.argument_keys
                if begins_arguments and (yield from self._hold_until(_VALUE)) == "{":
                    may_stream = False  # tried once per object, so that the time stays proportional to the text
                    before = "".join(self._held[first:key_start]).rstrip()
                    value = _loads(before.removesuffix(",") + "}") or {}
                    if "name" in value and before.endswith(","):
                        if not self._is_tool(value["name"]):
                            return False
                        self._start_call(value["name"])
                        is_certain = self._is_streaming = True
                key_start = None
            else:
                self._end_streaming()
                if is_certain and not character:
                    self._held.clear()
                return is_certain and not character

    def _may_be_key(self, key: str | None) -> bool:
        """Return False for a key that shows that a text without markers is no call."""
        return self._format.needs_opening or key in ("name", "id", "type", *self._format.argument_keys)

    def _end_call(self, first: int, *, is_certain: bool) -> bool:
        """End the object that is held from `first` on. Return False if it is no call."""
        if not is_certain:
            value = _loads("".join(self._held[first:])) or {}
            name, arguments = value.get("name"), self._arguments(value)
            if not self._is_tool(name) or arguments is None:
                return False
            self._start_call(name)
            self._held.append(arguments)
            self._give_arguments()
        self._held.clear()
        return True

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

    def _is_tool(self, name: Any) -> TypeGuard[str]:
        if not isinstance(name, str) or not name or not _is_unicode(name):
            return False
        return self._tool_names is None or name in self._tool_names

    def _read_named_call(self) -> Reading:
        """Read a name, text before the first brace, and an object. A call that breaks off is one, if it has begun."""
        if (yield from self._pieces.is_at(self._format.kind)):
            self._hold(len(self._format.kind))
        first = len(self._held)
        yield from self._hold_until(_NAME_END)
        name = "".join(self._held[first:])
        if not self._is_tool(name) or (yield from self._hold_until(self._object)) != "{":
            return False
        self._start_call(name)
        self._is_streaming, depth = True, 0
        while character := (yield from self._hold_until(_BRACES)):
            if character == '"':
                yield from self._hold_string()
                continue
            self._hold(1)
            depth += 1 if character == "{" else -1
            if depth == 0:
                break
        self._end_streaming()
        return True

    def _read_python_calls(self) -> Reading:
        """Read to the closing marker or the end. Return False unless all of it is calls of tools."""
        pieces, first, closing = self._pieces, len(self._held), self._format.closing
        while True:
            found = pieces.text.find(closing, pieces.position)
            end = found if found >= 0 else len(pieces.text) - begun_len(pieces.text, closing, pieces.position)
            self._hold(end - pieces.position)
            if found >= 0 or pieces.is_ended:
                break
            yield
        calls = python_calls("".join(self._held[first:]))
        if not calls or not all(self._is_tool(name) for name, _ in calls):
            return False
        for name, arguments in calls:
            self._start_call(name)
            self._held.append(arguments)
            self._give_arguments()
        return True

    def _read_bare_call(self) -> Reading:
        """Read `call:name{…}` or a name with tagged parameters. Return False if it is none; a call that breaks off is
        one, and the rest is content."""
        first, tags = len(self._held), self._format.tags
        marker = tags.call if tags else BARE_CALL
        if not (yield from self._pieces.is_at(marker)):
            return False
        self._hold(len(marker))
        yield from self._hold_until(_NAME_END)
        name = "".join(self._held[first:]).removeprefix(marker)
        name_end = (tags.name_end or "<") if tags else "{"
        if not self._is_tool(name) or (yield from self._hold_until(_NON_BLANK)) != name_end:
            return False
        self._start_call(name)
        self._is_streaming = True
        if tags:
            self._pieces.take(len(tags.name_end))
            texts = self._text_parameters.get(name, ())
            is_whole = yield from TaggedObject(self._pieces, tags, texts, self._held.append).read()
        else:
            is_whole = yield from BareObject(self._pieces, self._format.quote, self._held.append).read()
        self._end_streaming()
        return is_whole or (self._pieces.is_ended and self._pieces.is_empty)

    # --- Characters -------------------------------------------------------------------------

    def _hold(self, num_characters: int) -> None:
        """Take the next characters and hold them."""
        self._held.append(self._pieces.take(num_characters))

    def _hold_rest(self) -> None:
        self._hold(len(self._pieces.text))

    def _hold_until(self, pattern: re.Pattern[str]) -> Reading:
        """Hold text up to a character that matches, and return that; "" at the end of the text."""
        return (yield from self._pieces.until(pattern, self._held.append))

    def _hold_string(self) -> Reading:
        self._hold(1)
        while (yield from self._hold_until(_STRING_END)) == "\\":
            self._hold(1)
            while self._pieces.is_empty and not self._pieces.is_ended:
                yield
            self._hold(1)
        self._hold(1)

    def _drop(self, num_characters: int) -> None:
        """Drop the held text and the next characters."""
        self._hold(num_characters)
        self._held.clear()

    # --- Events -----------------------------------------------------------------------------

    def _release(self) -> None:
        """Release the held text as content."""
        text = "".join(self._held)
        self._held.clear()
        if text:
            self._follows_call = False
            self._events.append(ContentDelta(text, self._pieces.offset + self._pieces.position - len(text)))

    def _start_call(self, name: str) -> None:
        self._held.clear()
        self._events.append(ToolCallStart(self.num_calls, self._make_id(), name))
        self.num_calls += 1

    def _give_arguments(self) -> None:
        """Release the held text as arguments."""
        if text := "".join(self._held):
            self._events.append(ToolArgumentsDelta(self.num_calls - 1, text))
        self._held.clear()

    def _end_streaming(self) -> None:
        if self._is_streaming:
            self._give_arguments()
            self._is_streaming = False


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
