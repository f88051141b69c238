"""`ToolCallParser`: text as it is generated to content and calls of tools.

One engine for all formats (`formats.py`). Text that may be the beginning of a call is held back until it is certain;
what turns out to be none is content, so that every character comes out, but for markers and blanks around calls.
A call that has begun and breaks off stays a call: its arguments end where the JSON does, and what follows is content.
The joined content, the calls and their arguments do not depend on how the text was cut, and the time is proportional
to it. Never raises. Next to read: `call.py`.
"""

import enum
from collections.abc import Callable, Collection

from quire.text.tool_calls.call import CallReader, Status
from quire.text.tool_calls.events import ContentDelta, ToolArgumentsDelta, ToolCallStart, ToolEvent
from quire.text.tool_calls.formats import ToolCallFormat


class _Where(enum.Enum):
    START = "at the start of a text that may be a call"
    CONTENT = "in content, where an opening marker may come"
    PLAIN = "in content, where no call can come any more"
    GROUP = "behind the opening marker"
    LIST = "in a list of calls, between two"
    CALL = "in a call"
    AFTER = "behind a call or a list"


class ToolCallParser:
    """Reads one text. `feed` with its pieces, then `finish`.

    Attributes:
        num_calls: calls that have begun.
        has_incomplete_call: one of them broke off: its arguments are not the whole of a JSON object.
    """

    def __init__(
        self,
        format: ToolCallFormat,
        *,
        tool_names: Collection[str] | None = None,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        """`tool_names`: a call of another name is content; None: any name is a call's. `make_id`: for tests."""
        self.num_calls = 0
        self.has_incomplete_call = False
        self._format = format
        self._tool_names = tool_names
        self._make_id = make_id or format.make_id
        self._where = _Where.CONTENT if format.needs_opening else _Where.START
        self._events: list[ToolEvent] = []
        self._held: list[str] = []
        """Text that is content unless a call follows."""
        self._begun = ""
        """The beginning of a marker at the end of what was fed; it is read again with what comes."""
        self._offset = 0
        """Place in the whole text of position 0 of the piece that is read."""
        self._reader: CallReader | None = None
        self._is_list = False
        self._num_in_list = 0
        self._follows_call = False
        """Whether there was nothing but blanks since a call."""
        self._reads = {
            _Where.START: self._read_start,
            _Where.CONTENT: self._read_content,
            _Where.PLAIN: self._read_plain,
            _Where.GROUP: self._read_group,
            _Where.LIST: self._read_list,
            _Where.CALL: self._read_call,
            _Where.AFTER: self._read_after,
        }

    def feed(self, text: str) -> list[ToolEvent]:
        """Take the next piece of text; returns what it made certain."""
        text, self._begun = self._begun + text, ""
        position = 0
        while position < len(text):
            position = self._reads[self._where](text, position)
        self._offset += len(text) - len(self._begun)
        return self._take_events()

    def finish(self) -> list[ToolEvent]:
        """The text has ended: what was held back is content, unless it only closes calls."""
        reader, where = self._reader, self._where
        if reader is not None and reader.is_certain:
            self.has_incomplete_call |= reader.has_open_arguments
            self._reader = None
        elif where is _Where.AFTER or (where is _Where.LIST and self._num_in_list > 0):
            # Blanks, separators and a closing marker that was cut off say nothing.
            self._held.clear()
            self._begun = ""
        elif where is _Where.CONTENT and self._follows_call and not self._begun:
            self._held.clear()
        self._no_call(len(self._begun))
        self._where = _Where.PLAIN
        return self._take_events()

    # --- Places: each takes characters from `position` on and returns where it stopped --------

    def _read_content(self, text: str, position: int) -> int:
        marker = self._format.opening
        found = text.find(marker, position)
        end = found if found >= 0 else len(text) - _begun_len(text, position, marker)
        body = text[position:end].rstrip()
        if body:
            self._release(body, position + len(body))
        if position + len(body) < end:
            self._held.append(text[position + len(body) : end])
        if found < 0:
            self._begun = text[end:]
            return len(text)
        self._held.append(marker)
        self._where = _Where.GROUP
        return found + len(marker)

    def _read_plain(self, text: str, position: int) -> int:
        self._release(text[position:], len(text))
        return len(text)

    def _read_start(self, text: str, position: int) -> int:
        marker = self._format.opening
        if text.startswith(marker, position):
            self._held.append(marker)
            self._where = _Where.GROUP
            return position + len(marker)
        if _is_begun(text, position, marker):
            self._begun = text[position:]
            return len(text)
        return self._read_group(text, position)

    def _read_group(self, text: str, position: int) -> int:
        character = text[position]
        if character.isspace():
            self._held.append(character)
            return position + 1
        if character == "{":
            return self._start_call(position)
        if character == "[":
            self._held.append(character)
            self._is_list, self._num_in_list = True, 0
            self._where = _Where.LIST
            return position + 1
        return self._no_call(position)

    def _read_list(self, text: str, position: int) -> int:
        character = text[position]
        if character == "{":
            return self._start_call(position)
        if not character.isspace() and not (self._num_in_list and character in ",]"):
            return self._no_call(position)
        self._held.append(character)
        if character == "]":
            self._held.clear()
            self._is_list = False
            self._where = _Where.AFTER
        return position + 1

    def _start_call(self, position: int) -> int:
        self._reader = CallReader(self._format, self._tool_names)
        self._where = _Where.CALL
        return position

    def _read_call(self, text: str, position: int) -> int:
        reader = self._reader
        assert reader is not None
        read = reader.read(text, position)
        if read.name is not None:
            self._held.clear()
            self._events.append(ToolCallStart(self.num_calls, self._make_id(), read.name))
            self.num_calls += 1
        if read.arguments:
            self._events.append(ToolArgumentsDelta(self.num_calls - 1, "".join(read.arguments)))
        if read.status is Status.DONE:
            self._reader = None
            self._num_in_list += 1
            self._where = _Where.LIST if self._is_list else _Where.AFTER
        elif read.status is Status.BAD:
            self.has_incomplete_call |= reader.has_open_arguments
            return self._no_call(read.position)
        return read.position

    def _read_after(self, text: str, position: int) -> int:
        character, closing = text[position], self._format.closing
        if closing and text.startswith(closing, position):
            self._held.clear()
            self._to_content_after_call()
            return position + len(closing)
        if closing and _is_begun(text, position, closing):
            self._begun = text[position:]
            return len(text)
        if character.isspace() or character in self._format.separators:
            self._held.append(character)
            return position + 1
        if self._format.needs_opening:
            self._to_content_after_call()
            return position
        return self._read_group(text, position)

    def _to_content_after_call(self) -> None:
        if self._format.needs_opening:
            self._where = _Where.CONTENT
            self._follows_call = True

    # --- Events ---------------------------------------------------------------------------

    def _no_call(self, position: int) -> int:
        """What is held is content, and what comes from `position` on may be."""
        if self._reader is not None:
            self._held += self._reader.held
            self._reader = None
        self._release(self._begun, position)
        self._begun = ""
        self._is_list = False
        self._where = _Where.CONTENT if self._format.needs_opening else _Where.PLAIN
        return position

    def _release(self, text: str, end: int) -> None:
        """What is held and `text`, which ends before position `end`, are content."""
        text = "".join(self._held) + text
        self._held = []
        if text:
            self._follows_call = False
            self._events.append(ContentDelta(text, self._offset + end - len(text)))

    def _take_events(self) -> list[ToolEvent]:
        """The events so far, neighbouring pieces of content joined."""
        events: list[ToolEvent] = []
        pieces: list[ContentDelta] = []
        for event in self._events:
            if isinstance(event, ContentDelta):
                pieces.append(event)
                continue
            events += _joined(pieces)
            pieces = []
            events.append(event)
        self._events = []
        return events + _joined(pieces)


def _joined(pieces: list[ContentDelta]) -> list[ToolEvent]:
    return [ContentDelta("".join([piece.text for piece in pieces]), pieces[0].start)] if pieces else []


def _is_begun(text: str, position: int, marker: str) -> bool:
    """Whether the text ends within `marker`, which begins at `position`."""
    left = len(text) - position
    return left < len(marker) and marker.startswith(text[position:])


def _begun_len(text: str, position: int, marker: str) -> int:
    """Characters at the end of `text`, not before `position`, that are the beginning of `marker`."""
    longest = min(len(marker) - 1, len(text) - position)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
