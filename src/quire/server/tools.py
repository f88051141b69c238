"""Tools of a conversation: their description in the prompt, the parser of calls, and the schema of a demanded call.

A chat template that reads `tools` gets them, and the parser reads calls in the format of that template. For other
templates the system message describes the tools, and earlier calls become text of their messages. A demanded call is
structured output. Next to read: `quire/text/tool_calls/`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.server.protocol.tools import Offer
from quire.structured_outputs import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer
from quire.text.tool_calls.formats import GENERIC, ToolCallFormat, choose_format, uses_tools
from quire.text.tool_calls.parser import ContentDelta, ToolCallParser, ToolEvent
from quire.text.tool_calls.requests import tool_choice_schema, tool_names, tools_system_prompt

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
"""In the format of the chat API."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Settings of one request's calls.

    Fields:
        schema: of an answer that is only the demanded calls; None if no call is demanded.
        is_named: the request demands one tool by name; the finish reason then stays "stop".
        is_parallel: False keeps the first call only.
    """

    format: ToolCallFormat
    names: frozenset[str]
    schema: dict[str, Any] | None
    is_named: bool
    is_parallel: bool

    def sampling_values(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that calls need. Raises: InvalidParameterError."""
        chosen: dict[str, Any] = {}
        if self.format.has_special_marker:
            chosen["skip_special_tokens"] = False
        if self.schema is not None:
            chosen["structured_outputs"] = StructuredOutputsParams(json=self.schema)
        return chosen


def plan_tools(template: str | None, tokenizer: Tokenizer, offer: Offer | None, *, is_parallel: bool) -> ToolUse | None:
    """Return the settings of a request's calls; None without tools. Raises: InvalidParameterError."""
    if offer is None:
        return None
    schema = tool_choice_schema(offer.tools, offer.choice, parallel_tool_calls=is_parallel)
    call_format = GENERIC if schema is not None else choose_format(template, tokenizer)
    return ToolUse(
        call_format, frozenset(tool_names(offer.tools)), schema, isinstance(offer.choice, Mapping), is_parallel
    )


def fields_of(use: ToolUse | None) -> dict[str, str]:
    """Return names for `renaming`: the schema of a demanded call came as `tools`."""
    return {} if use is None or use.schema is None else {"structured_outputs": "tools"}


def messages_with_tools(template: str | None, messages: Messages, tools: Tools | None) -> Messages:
    """Return messages in the format that the template reads. Mutates: `messages`."""
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
    description = tools_system_prompt(tools)
    if messages and messages[0]["role"] in ("system", "developer") and isinstance(messages[0].get("content"), str):
        messages[0]["content"] += "\n\n" + description
        return messages
    return [{"role": "system", "content": description}, *messages]


def _arguments(text: str) -> Any:
    """Return arguments as templates expect them: an object if the text is one, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class ToolReader:
    """Parses one choice: from pieces of text to calls and the text beside them."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser = ToolCallParser(use.format, tool_names=use.names)

    def events(self, text: str, *, ends: bool) -> list[ToolEvent]:
        """Return the events of a piece of text; `ends`: it is the last one."""
        events = self._parser.feed(text)
        if ends:
            events += self._parser.finish()
        return [event for event in events if self._is_wanted(event)]

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason for the client: "tool_calls" after calls, unless one tool was demanded by name."""
        has_called = self._parser.num_calls > 0 and not self._use.is_named
        return "tool_calls" if reason == "stop" and has_called else reason

    def _is_wanted(self, event: ToolEvent) -> bool:
        if isinstance(event, ContentDelta):
            # Other text beside demanded calls is brackets, or a call that the length limit cut off.
            return self._use.schema is None
        return self._use.is_parallel or event.index == 0
