"""`ToolCallParser`: splits generated text into content and tool calls while it is generated.

One parser for all formats (`formats.py`). Text that may begin a call is held back until that is certain; if it is no
call it becomes content, so that every character is returned, except for markers and blanks around calls. A call that
breaks off stays a call: its arguments end where the text stops being JSON, and the rest is content. The joined
content, the calls and their arguments do not depend on how the text was cut, and the time is proportional to its
length. Never raises. Next to read: `call.py`.
"""

import enum
from collections.abc import Callable, Collection

from quire.text.stop_strings import begun_len
from quire.text.tool_calls.call import CallReader, Status
from quire.text.tool_calls.events import ContentDelta, ToolArgumentsDelta, ToolCallStart, ToolEvent
from quire.text.tool_calls.formats import ToolCallFormat


class _Place(enum.Enum):
    START = "at the start of a text that may be a call"
    CONTENT = "in content, where an opening marker may come"
    PLAIN = "in content, where no call can come any more"
    GROUP = "behind the opening marker"
    LIST = "in a list of calls, between two"
    CALL = "in a call"
    AFTER = "behind a call or a list"


class ToolCallParser:
    """Reads one text: call `feed` with its pieces, then `finish`. `num_calls` counts the calls that have begun."""

    def __init__(
        self,
        format: ToolCallFormat,
        *,
        tool_names: Collection[str] | None = None,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        """`tool_names`: a call of another name is content; None accepts any name. `make_id` replaces the format's."""
        self.num_calls = 0
        self._format = format
        self._tool_names = tool_names
        self._make_id = make_id or format.make_id
        self._place = _Place.CONTENT if format.needs_opening else _Place.START
        self._events: list[ToolEvent] = []
        self._held: list[str] = []
        """Text that is content unless a call follows."""
        self._begun = ""
        """The beginning of a marker at the end of the text so far; it is read again with the next piece."""
        self._offset = 0
        """Place in the whole text of position 0 of the piece that is read."""
        self._reader: CallReader | None = None
        self._is_list = False
        self._num_in_list = 0
        self._follows_call = False
        """Only blanks have come since a call."""
        self._reads = {
            _Place.START: self._read_start,
            _Place.CONTENT: self._read_content,
            _Place.PLAIN: self._read_plain,
            _Place.GROUP: self._read_group,
            _Place.LIST: self._read_list,
            _Place.CALL: self._read_call,
            _Place.AFTER: self._read_after,
        }

    def feed(self, text: str) -> list[ToolEvent]:
        """Take the next piece of text and return the events that are certain now."""
        text, self._begun = self._begun + text, ""
        position = 0
        while position < len(text):
            position = self._reads[self._place](text, position)
        self._offset += len(text) - len(self._begun)
        return self._take_events()

    def finish(self) -> list[ToolEvent]:
        """End the text: what was held back is content, unless it only closes calls."""
        place = self._place
        if self._reader is not None and self._reader.is_certain:
            self._reader = None
        elif place is _Place.AFTER or (place is _Place.LIST and self._num_in_list > 0):
            # Blanks, separators and a closing marker that was cut off are no content.
            self._held.clear()
            self._begun = ""
        elif place is _Place.CONTENT and self._follows_call and not self._begun:
            self._held.clear()
        self._no_call(len(self._begun))
        self._place = _Place.PLAIN
        return self._take_events()

    # --- Places: each reads characters from `position` on and returns the position where it stopped ---

    def _read_content(self, text: str, position: int) -> int:
        marker = self._format.opening
        found = text.find(marker, position)
        end = found if found >= 0 else len(text) - begun_len(text, marker, position)
        body = text[position:end].rstrip()
        if body:
            self._release(body, position + len(body))
        if position + len(body) < end:
            self._held.append(text[position + len(body) : end])
        if found < 0:
            self._begun = text[end:]
            return len(text)
        self._held.append(marker)
        self._place = _Place.GROUP
        return found + len(marker)

    def _read_plain(self, text: str, position: int) -> int:
        self._release(text[position:], len(text))
        return len(text)

    def _read_start(self, text: str, position: int) -> int:
        marker = self._format.opening
        if text.startswith(marker, position):
            self._held.append(marker)
            self._place = _Place.GROUP
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
            self._place = _Place.LIST
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
            self._place = _Place.AFTER
        return position + 1

    def _start_call(self, position: int) -> int:
        self._reader = CallReader(self._format, self._tool_names)
        self._place = _Place.CALL
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
            self._place = _Place.LIST if self._is_list else _Place.AFTER
        elif read.status is Status.BAD:
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
            self._place = _Place.CONTENT
            self._follows_call = True

    # --- Events ---------------------------------------------------------------------------

    def _no_call(self, position: int) -> int:
        """Release the held text as content and go on at `position`, in content."""
        if self._reader is not None:
            self._held += self._reader.held
            self._reader = None
        self._release(self._begun, position)
        self._begun = ""
        self._is_list = False
        self._place = _Place.CONTENT if self._format.needs_opening else _Place.PLAIN
        return position

    def _release(self, text: str, end: int) -> None:
        """Release the held text and `text`, which ends before position `end`, as content."""
        text = "".join(self._held) + text
        self._held = []
        if text:
            self._follows_call = False
            self._events.append(ContentDelta(text, self._offset + end - len(text)))

    def _take_events(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events


def _is_begun(text: str, position: int, marker: str) -> bool:
    """Return True if the text ends within `marker`, which begins at `position`."""
    left = len(text) - position
    return left < len(marker) and marker.startswith(text[position:])
