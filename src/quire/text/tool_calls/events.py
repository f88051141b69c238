"""Events of a reply: pieces of its reasoning and content, and its calls. Next to read: `parser.py`."""

from dataclasses import dataclass


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
