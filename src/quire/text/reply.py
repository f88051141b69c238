"""`ReplyReader`: the text of one choice as reasoning, content and calls, while it is generated or whole.

Next to read: `reasoning.py`, `harmony.py` and `tool_calls/parser.py`.
"""

from dataclasses import replace
from typing import Any

from quire.text.harmony import HarmonyReader
from quire.text.reasoning import Piece, ReasoningFormat, ReasoningParser
from quire.text.tool_calls.events import (
    ContentDelta,
    ReasoningDelta,
    ReplyEvent,
    ToolArgumentsDelta,
    ToolCallStart,
    ToolEvent,
)
from quire.text.tool_calls.parser import CallReading, CallWriter, ToolCallParser
from quire.text.tool_calls.readers import WrittenCall

__all__ = [
    "CallReading", "ContentDelta", "ReasoningDelta", "ReplyEvent", "ReplyReader", "ToolArgumentsDelta", "ToolCallStart",
]  # fmt: skip


class ReplyReader:
    """Parses one choice. Reasoning comes first, then content and calls; in gpt-oss's format they are messages."""

    def __init__(
        self, reasoning: ReasoningFormat | None, calls: CallReading | None, *, keeps_reasoning: bool = True
    ) -> None:
        """None: the text has no reasoning, or no calls. `keeps_reasoning`: False drops it."""
        self._reading, self._keeps_reasoning = calls, keeps_reasoning
        self._reasoning = self._harmony = self._calls = None
        self._writer: CallWriter | ToolCallParser | None = None
        writes_harmony = calls is not None and calls.format.is_harmony
        if writes_harmony or (reasoning is not None and reasoning.is_harmony):
            schemas = calls.schemas if calls is not None and writes_harmony else None
            self._harmony = HarmonyReader(schemas, is_open=reasoning is not None and reasoning.is_open)
        elif reasoning is not None:
            self._reasoning = ReasoningParser(reasoning)
        if calls is not None and writes_harmony:
            self._writer = CallWriter(calls)
        elif calls is not None:
            self._writer = self._calls = ToolCallParser(calls)
        self._num_chars = self._num_fed = 0
        """Characters of the whole text, and of those that `_calls` got."""
        self._places = [(0, 0)]
        """Places in the text of `_calls` and in the whole text, for each jump between messages."""

    def events(self, text: str, *, ends: bool) -> list[ReplyEvent]:
        """Return the events of a piece of text; `ends`: it is the last one."""
        pieces: list[Piece | WrittenCall] = [Piece(text, self._num_chars, is_reasoning=False)] if text else []
        if self._harmony is not None:
            pieces = self._harmony.feed(text, ends=ends)
        elif self._reasoning is not None:
            pieces = [*self._reasoning.feed(text), *(self._reasoning.finish() if ends else ())]
        self._num_chars += len(text)
        found: list[ReplyEvent] = []
        for piece in pieces:
            if isinstance(piece, WrittenCall):
                assert isinstance(self._writer, CallWriter)
                found += self._writer.write(piece)
            elif not piece.is_reasoning:
                found += self._content(piece)
            elif self._keeps_reasoning:
                found.append(ReasoningDelta(piece.text))
        if ends and self._calls is not None:
            found += self._placed(self._calls.finish())
        return found

    def deltas(self, text: str, *, ends: bool) -> list[dict[str, Any]]:
        """Return `events` in the format of the chat API."""
        return [_delta(event) for event in self.events(text, ends=ends)]

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason for the client: "tool_calls" after calls, unless one tool was demanded by name."""
        if self._reading is None or self._writer is None or self._reading.is_named or not self._writer.num_calls:
            return reason
        return "tool_calls" if reason == "stop" else reason

    def message(self, text: str, reason: str | None, *, ends: bool = True) -> tuple[dict[str, Any], str | None]:
        """Return content, reasoning and calls of an answer, and its finish reason. `ends`: False: more text follows."""
        content, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        for event in self.events(text, ends=ends):
            if isinstance(event, ContentDelta):
                content += event.text
            elif isinstance(event, ReasoningDelta):
                reasoning += event.text
            elif isinstance(event, ToolCallStart):
                calls.append({"id": event.id, "type": "function", "function": {"name": event.name}})
            else:
                calls[-1]["function"]["arguments"] = event.text
        found: dict[str, Any] = {"content": content or None if calls else content}
        found |= {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
        found |= {"tool_calls": calls} if calls else {}
        return found, self.finish_reason(reason)

    def _content(self, piece: Piece) -> list[ReplyEvent]:
        if self._calls is None:
            return [ContentDelta(piece.text, piece.start)]
        fed, place = self._places[-1]
        if piece.start - place != self._num_fed - fed:
            self._places.append((self._num_fed, piece.start))
        self._num_fed += len(piece.text)
        return self._placed(self._calls.feed(piece.text))

    def _placed(self, events: list[ToolEvent]) -> list[ReplyEvent]:
        """Return events with their place in the whole text."""
        return [self._moved(event) if isinstance(event, ContentDelta) else event for event in events]

    def _moved(self, content: ContentDelta) -> ContentDelta:
        fed, place = next(each for each in reversed(self._places) if each[0] <= content.start)
        return replace(content, start=content.start - fed + place)


def _delta(event: ReplyEvent) -> dict[str, Any]:
    """Reasoning has the name that vLLM's clients read, and the older one, which DeepSeek's and others do."""
    if isinstance(event, ReasoningDelta):
        return {"reasoning": event.text, "reasoning_content": event.text}
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
