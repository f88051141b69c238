"""What a parser finds in a text, piece by piece.

Next to read: `parser.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text that is no call. `start`: its place in all of the text, in characters; markers count there."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the calls of a text from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of a call's arguments, as the model writes them: together they are a JSON object."""

    index: int
    text: str


ToolEvent = ContentDelta | ToolCallStart | ToolArgumentsDelta
