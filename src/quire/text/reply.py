"""`ReplyReader`: the text of one choice as reasoning, content and calls, while it is generated or whole.

Next to read: `reasoning.py` and `tool_calls/parser.py`.
"""

import re
from dataclasses import replace
from typing import Any

from quire.text.detokenizer import begun_len
from quire.text.reasoning import Piece, ReasoningFormat, ReasoningParser
from quire.text.tool_calls.parser import (
    CallReading,
    CallWriter,
    ContentDelta,
    ReasoningDelta,
    ReplyEvent,
    ToolArgumentsDelta,
    ToolCallParser,
    ToolCallStart,
    ToolEvent,
)
from quire.text.tool_calls.readers import Passage, WrittenCall, call_with
from quire.text.tool_calls.schemas import ToolSchemas

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


# --- Messages of gpt-oss --------------------------------------------------------------------------
# The format is one grammar for reasoning, content and calls: messages, each with a header of a channel, a recipient and
# a constraint.
#
#     <|channel|>analysis<|message|>Hm.<|end|>                                        reasoning
#     <|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>               content: no recipient
#     <|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json
#         <|message|>{"city": "Ulm"}<|call|>                                          call
#     <|start|>assistant<|channel|>final<|message|>Sunny.                             content
#
# The recipient stands before or behind the channel, in any channel, with or without `functions.`. The text begins
# behind `<|start|>assistant`. Text that is no message is content; so is a message to another recipient, with its
# header, unless it is in the channel of the reasoning. Several messages are joined by line breaks.

MAX_HEADER_LEN = 512
_MESSAGE = "<|message|>"
_BEGINNINGS = ("<|start|>", "<|channel|>")
_MARKERS = ("<|end|>", "<|call|>", "<|return|>", *_BEGINNINGS)
_ENDS = re.compile("|".join(map(re.escape, _MARKERS)))
_HEADER_END = re.compile(r"<\|(?:message|end|call|return)\|>")
_HEADER_BEGINNINGS = (*_BEGINNINGS, "<|constrain|>", _MESSAGE, "to=")
_BLANKS = re.compile(r"\s*")
_ROLE = re.compile(r"<\|start\|>\s*(?!assistant\b)\w")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader:
    """Reads one text."""

    def __init__(self, schemas: ToolSchemas | None, *, is_open: bool = False) -> None:
        """`schemas`: None if there are no tools. `is_open`: the prompt ends within reasoning."""
        self._schemas = schemas or ToolSchemas()
        self._text, self._offset = "", 0
        """Text that is not given yet, and its place in the whole text."""
        self._at = self._scan = 0
        """Places in `_text`: what is not given yet, and where to search on from."""
        self._header: str | None = "" if is_open else None
        """Of the message that is read; None between messages."""
        self._tool: str | None = None
        self._is_reasoning = self._is_first = is_open
        self._has_given = {True: False, False: False}
        """A message of reasoning, or of content, came before."""
        self._found: list[Piece | WrittenCall] = []

    def feed(self, text: str, *, ends: bool) -> list[Piece | WrittenCall]:
        """Return what is certain with `text`; `ends`: it is the last one."""
        self._text, self._offset = self._text[self._at :] + text, self._offset + self._at
        self._scan, self._at = max(0, self._scan - self._at), 0
        while self._at < len(self._text):
            if not (self._read_header(ends) if self._header is None else self._read_body(ends)):
                break
        if ends and self._tool is not None:
            self._end_call(len(self._text), is_closed=False)
        found, self._found = self._found, []
        return found

    def _read_header(self, ends: bool) -> bool:
        """Read what stands before a message. Return False if more text is needed."""
        blank = _BLANKS.match(self._text, self._at)
        start = blank.end() if blank else self._at
        text = self._text[start : start + MAX_HEADER_LEN]
        if not ends and any(each.startswith(text) for each in _HEADER_BEGINNINGS):
            return False
        if not text and any(self._has_given.values()):
            return False  # blanks behind the last message
        match = _HEADER_END.search(text) if text.startswith(_HEADER_BEGINNINGS) else None
        if match is None and not ends and len(text) < MAX_HEADER_LEN and text.startswith(_HEADER_BEGINNINGS):
            return False
        self._header, self._is_first, self._is_reasoning, self._tool = "", True, False, None
        if match is None or match[0] != _MESSAGE:
            # A marker that begins no message is text.
            self._give(start + next((len(each) for each in _BEGINNINGS if text.startswith(each)), 0))
            return True
        self._header = self._text[self._at : start + match.end()]
        recipient, channel = _RECIPIENT.search(self._header), _CHANNEL.search(self._header)
        is_analysis = channel is not None and channel[1] == "analysis"
        if _ROLE.match(text) is None:
            self._tool = self._schemas.known(recipient[1]) if recipient else None
            self._is_reasoning = is_analysis and self._tool is None
        if self._tool is None and not self._is_reasoning and (recipient or _ROLE.match(text)):
            self._give(start + match.end())
        self._at = self._scan = start + match.end()
        return True

    def _read_body(self, ends: bool) -> bool:
        """Read a message up to its end. Return False if more text is needed."""
        match = _ENDS.search(self._text, self._scan)
        end = match.start() if match else len(self._text)
        if match is None and not ends:
            end -= max(begun_len(self._text, each, self._scan) for each in _MARKERS)
        if self._tool is None:
            self._give(end)
        elif match is not None:
            self._end_call(end, is_closed=True)
        self._scan = end
        if match is None:
            return False
        if match[0] not in _BEGINNINGS:
            self._at = self._scan = match.end()
        self._header = None
        return True

    def _end_call(self, end: int, *, is_closed: bool) -> None:
        """Give a call; what is none is content, with its header."""
        assert self._tool is not None
        passage = Passage(text=self._text, start=self._at, end=end, schemas=self._schemas, is_closed=is_closed)
        call = call_with(self._tool, passage, self._at)
        self._tool = None
        if call is None:
            header = self._header or ""
            self._found.append(Piece(header, self._offset + self._at - len(header), is_reasoning=False))
        else:
            self._found.append(call)
            self._at = call.end
            if not self._text[self._at : end].strip(" \n\t`}])"):
                self._at = end
        self._give(end)

    def _give(self, end: int) -> None:
        """Give the characters up to a place as reasoning or content."""
        if end > self._at:
            kind = self._is_reasoning
            if self._is_first and self._has_given[kind]:
                self._found.append(Piece("\n", self._offset + self._at, kind))
            self._is_first, self._has_given[kind] = False, True
            self._found.append(Piece(self._text[self._at : end], self._offset + self._at, kind))
            self._at = self._scan = end
