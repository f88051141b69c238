"""Tools of a conversation: how the model is told of them, how its calls are read, and how a call is demanded.

Where the chat template knows tools it is given them, and calls are read in the form that it teaches. Elsewhere they are
described in the system message, and earlier calls are written into the messages as the model was told to write them.
A demanded call is a form of the answer like any other. Next to read: `quire/text/tool_calls/`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.server.protocol.tools import Offer
from quire.structured_outputs import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer
from quire.text.tool_calls.events import ContentDelta, ToolCallStart, ToolEvent
from quire.text.tool_calls.formats import GENERIC, ToolCallFormat, choose_format, uses_tools
from quire.text.tool_calls.parser import ToolCallParser
from quire.text.tool_calls.requests import tool_choice_schema, tool_names, tools_system_prompt

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
"""As the chat API writes them."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the calls of one request are read.

    Fields:
        schema: of an answer that is nothing but the demanded calls; None where none is demanded.
        is_named: one tool was demanded by name; then a call does not count as a reason to stop.
        is_parallel: False keeps the first call only.
    """

    format: ToolCallFormat
    names: frozenset[str]
    schema: dict[str, Any] | None
    is_named: bool
    is_parallel: bool

    def sampling_values(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that calls need. Raises: InvalidParameterError."""
        chosen: dict[str, Any] = {}
        if self.format.has_special_marker:
            chosen["skip_special_tokens"] = False
        if self.schema is not None:
            chosen["structured_outputs"] = StructuredOutputsParams(json=self.schema)
        return chosen


def plan_tools(template: str | None, tokenizer: Tokenizer, offer: Offer | None, *, is_parallel: bool) -> ToolUse | None:
    """How the tools of a request are called; None without any. Raises: InvalidParameterError."""
    if offer is None:
        return None
    schema = tool_choice_schema(offer.tools, offer.choice, parallel_tool_calls=is_parallel)
    form = GENERIC if schema is not None else choose_format(template, tokenizer)
    return ToolUse(form, frozenset(tool_names(offer.tools)), schema, isinstance(offer.choice, Mapping), is_parallel)


def fields_of(use: ToolUse | None) -> dict[str, str]:
    """Names for `renaming`: a form that a demanded call has is `tools` to the client."""
    return {} if use is None or use.schema is None else {"structured_outputs": "tools"}


def messages_with_tools(template: str | None, messages: Messages, tools: Tools | None) -> Messages:
    """Messages as the template can show them. Mutates: `messages`."""
    if uses_tools(template):
        for message in messages:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        return messages
    for message in messages:
        calls = message.pop("tool_calls", None)
        if calls:
            written = [{"name": call["function"]["name"], "arguments": _arguments(call["function"]["arguments"])}
                       for call in calls]  # fmt: skip
            text = json.dumps(written[0] if len(written) == 1 else written, ensure_ascii=False)
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "\n".join(part["text"] for part in content)
            message["content"] = f"{content}\n{text}" if content else text
    if tools is None:
        return messages
    told = tools_system_prompt(tools)
    if messages and messages[0]["role"] in ("system", "developer") and isinstance(messages[0].get("content"), str):
        messages[0]["content"] += "\n\n" + told
        return messages
    return [{"role": "system", "content": told}, *messages]


def _arguments(text: str) -> Any:
    """Arguments as templates expect them: an object, if the text is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class ToolReader:
    """Reads one choice: from pieces of text to calls and to the text beside them."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser = ToolCallParser(use.format, tool_names=use.names)

    def events(self, text: str, *, ends: bool) -> list[ToolEvent]:
        """What a piece of text made certain; `ends`: it is the last one."""
        events = self._parser.feed(text)
        if ends:
            events += self._parser.finish()
        return [event for event in events if self._is_wanted(event)]

    def deltas(self, text: str, *, ends: bool) -> list[dict[str, Any]]:
        """`events` as the chat API writes them."""
        return [_delta(event) for event in self.events(text, ends=ends)]

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason that clients are told: calls are one, unless one tool was demanded by name."""
        has_called = self._parser.num_calls > 0 and not self._use.is_named
        return "tool_calls" if reason == "stop" and has_called else reason

    def _is_wanted(self, event: ToolEvent) -> bool:
        if isinstance(event, ContentDelta):
            # Beside demanded calls there is only what a limit cut off: brackets, and the beginning of a call.
            return self._use.schema is None
        return self._use.is_parallel or event.index == 0


def _delta(event: ToolEvent) -> dict[str, Any]:
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def read_message(use: ToolUse, text: str, reason: str | None) -> tuple[dict[str, Any], str | None]:
    """Content and calls of a whole answer, and its finish reason."""
    reader = ToolReader(use)
    content = ""
    calls: dict[int, dict[str, Any]] = {}
    for delta in reader.deltas(text, ends=True):
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            index = call.pop("index")
            if "id" in call:
                calls[index] = call
            else:
                calls[index]["function"]["arguments"] += call["function"]["arguments"]
    if not calls:
        return {"content": content}, reader.finish_reason(reason)
    return {"content": content or None, "tool_calls": list(calls.values())}, reader.finish_reason(reason)
