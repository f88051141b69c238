"""`ToolCallParser`: splits generated text into content and calls while it is generated; the events that it gives, and
`ToolCallFormat`, a row of the table of formats that it reads.

One parser for all rows of `formats.py` but harmony. Text that may begin a call is held back; from a marker or a lead on
the text is held until the call is complete, at the next marker or at the end, and then read as a whole. What cannot be
read is content, so that every character is returned, except for markers, leftovers of calls and blanks around them. The
joined content and the calls do not depend on how the text was cut, and the time is proportional to its length. Never
raises. Must not know which formats there are. Next to read: `readers.py`, then `formats.py`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import uuid4

from quire.text.detokenizer import begun_len
from quire.text.tool_calls.lenient_json import dump_json
from quire.text.tool_calls.readers import GAP, Passage, Reader, WrittenCall, objects
from quire.text.tool_calls.schemas import ToolSchemas

# --- Events of a reply: pieces of its reasoning and content, and its calls ------------------------


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Next piece of the reasoning."""

    text: str


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
    """All arguments of a call: the text of a JSON object."""

    index: int
    text: str


ToolEvent = ContentDelta | ToolCallStart | ToolArgumentsDelta
ReplyEvent = ReasoningDelta | ToolEvent


# --- Formats, and leads: the beginnings of calls that have no marker before them ------------------
# A lead is a sequence of small patterns, each of which matches one character or any number of them, so that every
# beginning of a match can be recognised while a text is generated.

MAX_LEAD_LEN = 160
"""Most characters of a lead: a longer text that does not match begins no call."""
_IN_JSON = ("[", "{", '",', "',", "},", "],", '":', "':")
"""Ends of a text that goes on with a part of a JSON value."""


@dataclass(frozen=True)
class Lead:
    """A beginning of calls.

    Fields:
        parts: patterns that match in sequence. The group `name` must be the name of a tool.
        keys: what the group `key` may be.
        begins_line: it is found at the beginning of a line only; otherwise anywhere but within JSON.
    """

    parts: tuple[str, ...]
    keys: frozenset[str] = frozenset()
    begins_line: bool = False

    @cached_property
    def start(self) -> str:
        """Return a pattern of the first character."""
        return r"(?<![^\n])[\w.-]" if self.begins_line else self.parts[0]

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        return re.compile("".join(self.parts))

    @cached_property
    def _begun(self) -> re.Pattern[str]:
        return re.compile(
            self.parts[0] + "".join(f"(?:{part}" for part in self.parts[1:]) + ")?" * (len(self.parts) - 1)
        )

    def is_at(self, text: str, place: int, schemas: ToolSchemas, *, ends: bool) -> bool | None:
        """Return whether the lead is at a place; None if more text decides that."""
        end = min(len(text), place + MAX_LEAD_LEN)
        match = self._whole.match(text, place, end)
        if match is not None:
            groups = match.groupdict()
            name = groups.get("name")
            return groups.get("key", "") in (self.keys or ("",)) and (name is None or schemas.known(name) is not None)
        if ends or end - place == MAX_LEAD_LEN:
            return False
        begun = self._begun.fullmatch(text, place, end)
        if begun is None:
            return False
        key, name = (begun.groupdict().get(group) or "" for group in ("key", "name"))
        may_be = (not self.keys or any(each.startswith(key) for each in self.keys)) and schemas.may_begin(name)
        return None if may_be else False


def is_within_json(before: str) -> bool:
    """Return True if a text ends within a JSON value, so that an object behind it is a part of that."""
    return before.rstrip().endswith(_IN_JSON)


def literally(text: str) -> tuple[str, ...]:
    """Return parts of a lead that match a text."""
    return tuple(map(re.escape, text))


def _json_leads() -> tuple[Lead, ...]:
    key = ("[\\[{]", r"[\s\[{]*", "[\"']", r"(?P<key>\w*)", "[\"']", r"\s*", ":")
    name = (*key, r"\s*", "[\"']", r"(?P<name>[^\"'\n]*)", "[\"']")
    kind = (*key, r"\s*", "[\"']", *literally("function"), "[\"']")
    leads = (
        Lead(name, frozenset({"name", "tool_name", "function"})),
        Lead(kind, frozenset({"type"})),
        Lead(key, frozenset({"tool_call_id", "function", "arguments", "parameters"})),
    )
    fence = ("`", "`", "`", r"\w*", r"\s*")
    return (*leads, *(Lead(fence + lead.parts, lead.keys) for lead in leads))


JSON_LEADS = _json_leads()


def long_id() -> str:
    """Return an id like OpenAI's: `call_` and 24 characters."""
    return f"call_{uuid4().hex[:24]}"


def short_id() -> str:
    """Return nine letters and digits: Mistral's templates accept no other id."""
    return uuid4().hex[:9]


@dataclass(frozen=True)
class ToolCallFormat:
    """A family's way to write calls.

    Fields:
        name: of the format.
        models: families that use it.
        read: reads the calls behind an opening marker or a lead.
        openings: markers before a call, or before several.
        closings: markers behind a call, or behind several. A closing marker that follows calls is dropped.
        leads: beginnings of calls without a marker.
        dropped: markers around the content, which are no part of it.
        signs: texts of a chat template that show the format, of which one group must be there; without any, the first
            opening marker.
        make_id: makes the ids of calls.
        reads_json: JSON objects are calls as well, whatever else the family writes: models slip into it.
        is_harmony: calls, reasoning and content are messages, see `HarmonyReader`.
    """

    name: str
    models: str
    read: Reader = objects
    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    leads: tuple[Lead, ...] = ()
    dropped: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    make_id: Callable[[], str] = long_id
    reads_json: bool = True
    is_harmony: bool = False

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Return all markers, the longest first."""
        return tuple(sorted({*self.openings, *self.closings, *self.dropped}, key=len, reverse=True))

    @cached_property
    def all_leads(self) -> tuple[Lead, ...]:
        """Return the leads of the family, and those of JSON."""
        return (*self.leads, *JSON_LEADS) if self.reads_json else self.leads

    @cached_property
    def bounds(self) -> re.Pattern[str]:
        """Return the pattern of the markers that end a call."""
        return re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")

    @cached_property
    def beginnings(self) -> re.Pattern[str]:
        """Return the pattern of the markers, and of characters with which a lead may begin."""
        starts = dict.fromkeys(lead.start for lead in self.all_leads)
        return re.compile("|".join([*map(re.escape, self.markers), *starts]) or r"(?!)")


# --- The parser -----------------------------------------------------------------------------------

MAX_TRIES = 8
"""Markers at which one call may end: a string in it may hold some."""
CONTEXT_LEN = 64
"""Characters of released text that are kept, to see what stands before a lead."""
_LEFTOVERS = re.compile(r"\s*[})\];,]")
_LEFT_FENCE = re.compile(r"\s*```")
_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReading:
    """Settings for reading the calls of a request's answers.

    Fields:
        schema: of an answer that is only the demanded calls; None if no call is demanded.
        is_named: the request demands one tool by name; the finish reason then stays "stop".
        is_parallel: False keeps the first call only.
    """

    format: ToolCallFormat
    schemas: ToolSchemas
    schema: Mapping[str, Any] | None = None
    is_named: bool = False
    is_parallel: bool = True


class CallWriter:
    """Makes the events of calls. `num_calls` counts those that the client gets."""

    def __init__(self, reading: CallReading, make_id: Callable[[], str] | None = None) -> None:
        """`make_id` replaces the format's."""
        self._reading, self._make_id = reading, make_id or reading.format.make_id
        self._ids: set[str] = set()
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self.num_calls = 0
        self.is_ended = False
        """A demanded call came twice: models then repeat it up to the limit."""

    def write(self, call: WrittenCall) -> list[ToolEvent]:
        """Return the events of a call; none if the client does not get it."""
        same = (call.name, call.arguments)
        self.is_ended = self.is_ended or (self._reading.schema is not None and same in self._calls)
        if self.is_ended or (self._calls and not self._reading.is_parallel):
            return []
        self._calls.append(same)
        call_id = call.id if call.id and call.id not in self._ids else self._make_id()
        self._ids.add(call_id)
        index, self.num_calls = self.num_calls, self.num_calls + 1
        arguments = dump_json(call.arguments) or "{}"
        return [ToolCallStart(index, call_id, call.name), ToolArgumentsDelta(index, arguments)]


class ToolCallParser:
    """Reads one text: call `feed` with its pieces, then `finish`."""

    def __init__(self, reading: CallReading, *, make_id: Callable[[], str] | None = None) -> None:
        """`make_id` replaces the format's."""
        self._format, self._schemas = reading.format, reading.schemas
        self._writer = CallWriter(reading, make_id)
        self._events: list[ToolEvent] = []
        self._text, self._offset = "", 0
        """Text that is not released, behind some that is; `_offset`: its place in the whole text."""
        self._done = self._solid = self._scan = 0
        """Places in `_text`: end of the released text; end of what is content if blanks follow it; place to search on
        from."""
        self._follows_call = self._left_fence = False
        self._body: int | None = None
        """Beginning of the call that is held, behind its marker."""
        self._place = 0
        """Beginning of its marker."""
        self._ends: list[int] = []
        """Places of markers at which that call did not end."""
        self._is_marked = False
        self._pending: list[str] = []
        """Pieces of a held call without any end of it."""
        self._window = ""

    @property
    def num_calls(self) -> int:
        """Return the number of calls that the client got."""
        return self._writer.num_calls

    def feed(self, text: str) -> list[ToolEvent]:
        """Take the next piece of text and return the events that are certain now."""
        if self._body is not None:
            # Joining the pieces for each one would take quadratic time.
            self._pending.append(text)
            window = self._window + text
            self._window = window[-CONTEXT_LEN:]
            return self._read(ends=False) if self._format.bounds.search(window) else []
        self._pending.append(text)
        return self._read(ends=False)

    def finish(self) -> list[ToolEvent]:
        """End the text: what was held back is content, unless it belongs to a call."""
        return self._read(ends=True)

    def _read(self, *, ends: bool) -> list[ToolEvent]:
        self._text += "".join(self._pending)
        self._pending.clear()
        while not self._writer.is_ended and (
            self._read_call(ends=ends) if self._body is not None else self._find_call(ends=ends)
        ):
            pass
        if self._writer.is_ended:
            self._done = self._solid = self._scan = len(self._text)
        self._window = self._text[-CONTEXT_LEN:]
        cut = max(0, self._done - CONTEXT_LEN)
        self._text, self._offset = self._text[cut:], self._offset + cut
        self._done, self._solid, self._scan = self._done - cut, self._solid - cut, self._scan - cut
        if self._body is not None:
            self._body, self._place, self._ends = self._body - cut, self._place - cut, [e - cut for e in self._ends]
        events, self._events = self._events, []
        return events

    # --- Content ----------------------------------------------------------------------------

    def _find_call(self, *, ends: bool) -> bool:
        """Release content up to the next call. Return False if more text is needed."""
        if self._follows_call and not self._drop_leftovers(ends=ends):
            return False
        text, row = self._text, self._format
        limit = len(text) - (0 if ends else self._begun_len())
        while (match := row.beginnings.search(text, self._scan)) is not None and match.start() < limit:
            place, end = match.span()
            if match[0] in row.openings:
                self._begin_call(place, end, is_marked=True)
                return True
            if match[0] in row.dropped or (match[0] in row.closings and self.num_calls):
                self._release(place, keeps_blanks=True)
                self._done = self._solid = self._scan = end
                continue
            if match[0] in row.closings:
                self._scan = end
                continue
            is_lead = self._is_lead(place, ends=ends)
            if is_lead:
                self._begin_call(place, place, is_marked=False)
                return True
            if is_lead is None:
                self._scan = place
                self._release(place)
                return False
            self._scan = place + 1
        self._scan = limit
        self._release(limit, keeps_blanks=ends)
        return False

    def _begun_len(self) -> int:
        """Return how many characters at the end of the text may begin a marker."""
        return max((begun_len(self._text, marker, self._scan) for marker in self._format.markers), default=0)

    def _is_lead(self, place: int, *, ends: bool) -> bool | None:
        """Return whether a call begins at a place; None if more text decides that."""
        before = self._text[max(0, place - CONTEXT_LEN) : place]
        begins_line, is_within = before[-1:] in ("", "\n"), is_within_json(before)
        leads = [lead for lead in self._format.all_leads if (begins_line if lead.begins_line else not is_within)]
        found = {lead.is_at(self._text, place, self._schemas, ends=ends) for lead in leads}
        return True if True in found else None if None in found else False

    def _release(self, end: int, *, keeps_blanks: bool = False) -> None:
        """Release content up to a place; blanks before it are held, since none are content before a call."""
        body = self._text[self._solid : end].rstrip()
        self._solid += len(body)
        if keeps_blanks:
            self._solid = max(self._solid, end)
        if self._solid > self._done:
            self._events.append(ContentDelta(self._text[self._done : self._solid], self._offset + self._done))
            self._done = self._solid

    def _drop_leftovers(self, *, ends: bool) -> bool:
        """Drop brackets and markers behind a call. Return False if more text is needed."""
        text, row = self._text, self._format
        while True:
            match = _BLANKS.match(text, self._done)
            start = match.end() if match else self._done
            marker = next((each for each in (*row.closings, *row.dropped) if text.startswith(each, start)), None)
            fence = _LEFT_FENCE.match(text, self._done) if self._left_fence else None
            left = fence or _LEFTOVERS.match(text, self._done)
            if marker is None and left is None:
                break
            self._left_fence = self._left_fence and fence is None
            self._done = start + len(marker) if marker else left.end() if left else start
        rest = text[start:]
        fences = ("```",) if self._left_fence else ()
        is_open = not rest or any(each.startswith(rest) for each in (*fences, *row.closings, *row.dropped))
        self._solid = self._scan = self._done
        if is_open and ends:
            self._done = self._solid = self._scan = len(text)
        self._follows_call = is_open
        return not is_open

    # --- Calls ------------------------------------------------------------------------------

    def _begin_call(self, place: int, body: int, *, is_marked: bool) -> None:
        self._release(place)
        self._body = self._scan = body
        self._place, self._is_marked = place, is_marked
        self._ends.clear()

    def _read_call(self, *, ends: bool) -> bool:
        """Read the call that is held. Return False if it is not complete."""
        text, row = self._text, self._format
        assert self._body is not None
        while (match := row.bounds.search(text, self._scan)) is not None:
            self._scan = match.end()
            if match[0] in row.openings and not self._ends and not text[self._body : match.start()].strip():
                self._body = match.end()  # a marker before several calls, then that of the first
                continue
            if self._has_calls(match.start(), is_closed=True):
                return True
            self._ends.append(match.start())
            if len(self._ends) == MAX_TRIES:
                break
        else:
            if not ends:
                self._scan = len(text) - self._begun_len()
                return False
            if self._has_calls(len(text)):
                return True
        if not self._ends or not self._has_calls(self._ends[0], is_closed=True, is_last_try=True):
            self._scan = max(self._body, self._place + 1)
            self._body = None
        return True

    def _has_calls(self, end: int, *, is_closed: bool = False, is_last_try: bool = False) -> bool:
        """Return True if there are calls up to a place, and give their events.

        At a closing marker all of the text must be calls, unless it is the last try: the marker may stand in a string.
        """
        assert self._body is not None
        passage = Passage(
            text=self._text,
            start=self._body,
            end=end,
            schemas=self._schemas,
            is_marked=self._is_marked,
            is_closed=is_closed,
            is_last_try=is_last_try,
        )
        calls = self._format.read(passage)
        if not calls and self._format.reads_json:
            calls = objects(passage)
        if not calls or (is_closed and not is_last_try and passage.after(GAP, calls[-1].end) < end):
            return False
        for call in calls:
            self._events += self._writer.write(call)
        self._left_fence = self._text.find("```", self._done, calls[-1].end) >= 0
        self._done = self._solid = self._scan = calls[-1].end
        self._body, self._follows_call = None, True
        return True
