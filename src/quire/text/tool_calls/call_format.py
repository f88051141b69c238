"""`ToolCallFormat`: a row of the table of formats; `Lead`: the beginning of a call that has no marker before it.

A lead is a sequence of small patterns, each of which matches one character or any number of them, so that every
beginning of a match can be recognised while a text is generated. Must not know which formats there are. Next to read:
`formats.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from uuid import uuid4

from quire.text.tool_calls.readers import Reader, objects
from quire.text.tool_calls.schemas import ToolSchemas

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
        is_harmony: calls, reasoning and content are messages, see `harmony.py`.
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
