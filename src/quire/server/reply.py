"""`ReplyReader`: the text of one choice as reasoning, content and calls, while it is generated or whole.

Next to read: `../text/reasoning.py` and `tools.py`; `routes/chat.py` and `routes/responses.py` write the events.
"""

from dataclasses import dataclass, replace
from typing import Any

from quire.server.tools import ToolUse
from quire.text.reasoning import Piece, ReasoningFormat, ReasoningParser
from quire.text.tool_calls.parser import ContentDelta, ToolCallParser, ToolCallStart, ToolEvent


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
        self._tool_use = tool_use
        self._calls = None
        if tool_use is not None:
            texts = tool_use.text_parameters
            self._calls = ToolCallParser(tool_use.format, tool_names=tool_use.names, text_parameters=texts)
        self._keeps_reasoning = keeps_reasoning
        self._num_chars = 0
        self._offset: int | None = None
        """Place in the whole text of the first character that `_calls` reads."""

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
        if ends and self._calls is not None:
            found += self._wanted(self._calls.finish())
        return found

    def deltas(self, text: str, *, ends: bool) -> list[dict[str, Any]]:
        """Return `events` in the format of the chat API."""
        return [_delta(event) for event in self.events(text, ends=ends)]

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason for the client: "tool_calls" after calls, unless one tool was demanded by name."""
        if self._tool_use is None or self._calls is None or self._tool_use.is_named or not self._calls.num_calls:
            return reason
        return "tool_calls" if reason == "stop" else reason

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
        found |= {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
        found |= {"tool_calls": list(calls.values())} if calls else {}
        return found, self.finish_reason(reason)

    def _content(self, piece: Piece) -> list[ReplyEvent]:
        if self._calls is None:
            return [ContentDelta(piece.text, piece.start)] if piece.text else []
        if self._offset is None:
            self._offset = piece.start
        return self._wanted(self._calls.feed(piece.text))

    def _wanted(self, events: list[ToolEvent]) -> list[ReplyEvent]:
        """Return the events that the client gets, with their place in the whole text."""
        assert self._tool_use is not None
        found: list[ReplyEvent] = []
        for event in events:
            if not isinstance(event, ContentDelta):
                if self._tool_use.is_parallel or event.index == 0:
                    found.append(event)
            # Other text beside demanded calls is brackets, or a call that the length limit cut off.
            elif self._tool_use.schema is None:
                found.append(replace(event, start=event.start + (self._offset or 0)))
        return found


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
