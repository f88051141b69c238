"""Merged output of a parser."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.text.tool_calls.parser import CallReading, ContentDelta, ToolCallFormat, ToolCallParser, ToolCallStart
from quire.text.tool_calls.schemas import ToolSchemas


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """Return a tool in the format of the chat API."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("weather", city={"type": "string"}, days={"type": "integer"})
TOOLS = [WEATHER, tool("clock"), tool("f"), tool("g"), tool("a.g"), tool("a-c"), tool("brave_search")]


@dataclass
class Parsed:
    """Joined content, and per call its name and arguments; checks the order of events and places of content."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


def parse(
    format: ToolCallFormat, pieces: Sequence[str], *, tools: Sequence[Any] | None = None, **reading: Any
) -> Parsed:
    """Parse a text. Without `tools` any name is that of a tool."""
    counter = itertools.count()
    chosen = CallReading(format=format, schemas=ToolSchemas(tools), **reading)
    parser = ToolCallParser(chosen, make_id=lambda: f"id{next(counter)}")
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    found = Parsed()
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
            assert event.index == len(found.ids)
            found.ids.append(event.id)
            found.calls.append((event.name, ""))
        else:
            assert found.calls[event.index][1] == "", "arguments come in one piece"
            found.calls[event.index] = (found.calls[event.index][0], event.text)
    assert parser.num_calls == len(found.calls)
    return found


def cuts(text: str, num_random: int = 4) -> Iterator[list[str]]:
    """Yield the whole text, its characters, and the text cut at random places."""
    yield [text]
    yield list(text)
    for seed in range(num_random):
        places = sorted(random.Random(seed).randrange(len(text) + 1) for _ in range(6))
        yield [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
