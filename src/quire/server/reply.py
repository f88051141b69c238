"""`ReplyReader`: the text of one choice as reasoning, content and calls, while it is generated or whole.

Next to read: `../text/reasoning.py` and `tools.py`; `routes/chat.py` and `routes/responses.py` write the events.
"""

from dataclasses import dataclass, replace
from typing import Any

from quire.server.tools import ToolReader, ToolUse
from quire.text.reasoning import Piece, ReasoningFormat, ReasoningParser
from quire.text.tool_calls.parser import ContentDelta, ToolCallStart, ToolEvent


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Next piece of the reasoning."""

    text: str


ReplyEvent = ReasoningDelta | ToolEvent


class ReplyReader:
    """Parses one choice."""

    def __init__(self, reasoning: ReasoningFormat | None, tool_use: ToolUse | None, *, keeps_reasoning: bool) -> None:
        """None: the text has no reasoning, or no calls. `keeps_reasoning`: False drops it."""
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning)
        self._tools = None if tool_use is None else ToolReader(tool_use)
        self._keeps_reasoning = keeps_reasoning
        self._num_chars = 0
        self._offset: int | None = None
        """Place in the whole text of the first character that `_tools` reads."""

    def events(self, text: str, *, ends: bool) -> list[ReplyEvent]:
        """Return the events of a piece of text; `ends`: it is the last one."""
        if self._reasoning is None:
            pieces = [Piece(text, self._num_chars, is_reasoning=False)]
        else:
            pieces = self._reasoning.feed(text) + (self._reasoning.finish() if ends else [])
        self._num_chars += len(text)
        found: list[ReplyEvent] = []
        for piece in pieces:
            if not piece.is_reasoning:
                found += self._content(piece)
            elif self._keeps_reasoning:
                found.append(ReasoningDelta(piece.text))
        if ends and self._tools is not None:
            found += self._placed(self._tools.events("", ends=True))
        return found

    def deltas(self, text: str, *, ends: bool) -> list[dict[str, Any]]:
        """Return `events` in the format of the chat API."""
        return [_delta(event) for event in self.events(text, ends=ends)]

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason for the client."""
        return reason if self._tools is None else self._tools.finish_reason(reason)

    def message(self, text: str, reason: str | None) -> tuple[dict[str, Any], str | None]:
        """Return content, reasoning and calls of a whole answer, and its finish reason."""
        content, reasoning = "", ""
        calls: dict[int, dict[str, Any]] = {}
        for delta in self.deltas(text, ends=True):
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                index = call.pop("index")
                if "id" in call:
                    calls[index] = call
                else:
                    calls[index]["function"]["arguments"] += call["function"]["arguments"]
        found: dict[str, Any] = {"content": content or None if calls else content}
        found |= {"reasoning_content": reasoning} if reasoning else {}
        found |= {"tool_calls": list(calls.values())} if calls else {}
        return found, self.finish_reason(reason)

    def _content(self, piece: Piece) -> list[ReplyEvent]:
        if self._tools is None:
            return [ContentDelta(piece.text, piece.start)] if piece.text else []
        if self._offset is None:
            self._offset = piece.start
        return self._placed(self._tools.events(piece.text, ends=False))

    def _placed(self, events: list[ToolEvent]) -> list[ReplyEvent]:
        offset = self._offset or 0
        return [
            replace(event, start=event.start + offset) if isinstance(event, ContentDelta) else event for event in events
        ]


def _delta(event: ReplyEvent) -> dict[str, Any]:
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
