"""Merged output of a parser."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.text.tool_calls.formats import ToolCallFormat
from quire.text.tool_calls.parser import ContentDelta, ToolCallParser, ToolCallStart


@dataclass
class Parsed:
    """Joined content, and per call its name and joined arguments; checks the order of events and places of content."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    num_events: int = 0


def parse(format: ToolCallFormat, pieces: Sequence[str], **options: Any) -> Parsed:
    counter = itertools.count()
    parser = ToolCallParser(format, make_id=lambda: f"id{next(counter)}", **options)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    found = Parsed(num_events=len(events))
    text = "".join(pieces)
    content_end = 0
    for event in events:
        if isinstance(event, ContentDelta):
            assert event.text
            assert text[event.start : event.start + len(event.text)] == event.text
            assert event.start >= content_end, "in order"
            found.content += event.text
            content_end = event.start + len(event.text)
        elif isinstance(event, ToolCallStart):
            assert event.index == len(found.calls)
            found.calls.append((event.name, ""))
            found.ids.append(event.id)
        else:
            assert event.text
            assert event.index == len(found.calls) - 1
            name, arguments = found.calls[-1]
            found.calls[-1] = (name, arguments + event.text)
    assert parser.num_calls == len(found.calls)
    return found
