"""The items of a response, made from the pieces of its text: messages, and calls of functions.

One engine for both kinds of answers: a whole one takes its items, a stream its events too, and both are the same
however the text was cut into pieces. Next to read: `response_stream.py`, `response_logprobs.py`, `../tools.py`.
"""

import json
from typing import Any

from quire.engine.process.messages import ChoiceUpdate
from quire.server.routes.response_job import ResponseJob, item_id
from quire.server.tools import ToolReader
from quire.text.tool_calls.events import ToolArgumentsDelta, ToolCallStart, ToolEvent

Event = tuple[str, dict[str, Any]]
"""Type and content of one event of a stream, but for its number."""


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponseOutput:
    """Makes items from text. `items`: those that are complete, in order."""

    def __init__(self, job: ResponseJob) -> None:
        self.items: list[dict[str, Any]] = []
        self._job = job
        self._reader = None if job.tool_use is None else ToolReader(job.tool_use)
        self._logprobs = None if self._reader is None else job.text_logprobs()
        self._num_chars = 0
        self._open: _Message | _Call | None = None

    def begin(self) -> list[Event]:
        """The events before the first text. Without tools there will be nothing but one message."""
        return self._start(_Message()) if self._reader is None else []

    def write(self, choice: ChoiceUpdate) -> list[Event]:
        """The events of what is new. Mutates: the items, and what the next piece continues."""
        ends = choice.finish_reason is not None
        self._num_chars += len(choice.text)
        logprobs = self._job.logprobs(choice)
        if self._logprobs is not None:
            self._logprobs.add(choice.token_ids, logprobs)
        if self._reader is not None:
            found = self._reader.events(choice.text, ends=ends)
            events = [event for item in found for event in self._take(item)]
        else:
            events = self._add(choice.text, logprobs) if choice.text or logprobs else []
        if ends:
            if self._open is None:
                events += self._start(_Message())
            if self._logprobs is not None and (rest := self._logprobs.take_rest(self._num_chars)):
                events += self._add("", rest)
            events += self._end(is_cut=choice.finish_reason == "length")
        return events

    def _take(self, event: ToolEvent) -> list[Event]:
        if isinstance(event, ToolCallStart):
            return [*self._end(is_cut=False), *self._start(_Call(event))]
        if isinstance(event, ToolArgumentsDelta):
            assert isinstance(self._open, _Call)
            return self._open.add(event.text, len(self.items))
        logprobs = []
        if self._logprobs is not None:
            logprobs = self._logprobs.take(event.start, event.start + len(event.text))
        return self._add(event.text, logprobs)

    def _add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """More of a message, which begins with it unless it has begun."""
        events: list[Event] = []
        if not isinstance(self._open, _Message):
            events = [*self._end(is_cut=False), *self._start(_Message())]
        assert isinstance(self._open, _Message)
        return [*events, *self._open.add(text, logprobs, len(self.items))]

    def _start(self, item: "_Message | _Call") -> list[Event]:
        self._open = item
        return item.begin(len(self.items))

    def _end(self, *, is_cut: bool) -> list[Event]:
        """The open item is complete, or never will be: the text was cut off in it."""
        if self._open is None:
            return []
        events, item = self._open.end(len(self.items), is_cut=is_cut)
        events.append(("response.output_item.done", {"output_index": len(self.items), "item": item}))
        self.items.append(item)
        self._open = None
        return events


class _Message:
    """Text that is being written."""

    def __init__(self) -> None:
        self._id = item_id("msg")
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def begin(self, index: int) -> list[Event]:
        return [
            ("response.output_item.added", {"output_index": index, "item": self._item("in_progress", [])}),
            ("response.content_part.added", {**self._place(index), "part": text_part("", [])}),
        ]

    def add(self, text: str, logprobs: list[dict[str, Any]], index: int) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [("response.output_text.delta", {**self._place(index), "delta": text, "logprobs": logprobs})]

    def end(self, index: int, *, is_cut: bool) -> tuple[list[Event], dict[str, Any]]:
        text, place = "".join(self._texts), self._place(index)
        part = text_part(text, self._logprobs)
        events = [
            ("response.output_text.done", {**place, "text": text, "logprobs": self._logprobs}),
            ("response.content_part.done", {**place, "part": part}),
        ]
        return events, self._item("incomplete" if is_cut else "completed", [part])

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._id, "status": status, "role": "assistant", "content": content}

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": index, "content_index": 0}


class _Call:
    """A call whose arguments are being written."""

    def __init__(self, start: ToolCallStart) -> None:
        self._id = item_id("fc")
        self._start = start
        self._texts: list[str] = []

    def begin(self, index: int) -> list[Event]:
        return [("response.output_item.added", {"output_index": index, "item": self._item("in_progress", "")})]

    def add(self, text: str, index: int) -> list[Event]:
        self._texts.append(text)
        return [("response.function_call_arguments.delta", {**self._place(index), "delta": text})]

    def end(self, index: int, *, is_cut: bool) -> tuple[list[Event], dict[str, Any]]:
        arguments = "".join(self._texts)
        # The text may have been cut off behind the arguments, or have broken off within them by itself.
        status = "completed" if _is_json(arguments) else "incomplete"
        done = {**self._place(index), "name": self._start.name, "arguments": arguments}
        return [("response.function_call_arguments.done", done)], self._item(status, arguments)

    def _item(self, status: str, arguments: str) -> dict[str, Any]:
        start = self._start
        return {"type": "function_call", "id": self._id, "call_id": start.id, "name": start.name,
                "arguments": arguments, "status": status}  # fmt: skip

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": index}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
