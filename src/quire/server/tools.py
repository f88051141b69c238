"""Tools of a conversation: their description in the prompt, and the schema of a demanded call.

A chat template that reads `tools` gets them, and the parser reads calls in the format of that template. For other
templates the system message describes the tools, and earlier calls become text of their messages, unless the template
writes them itself (DeepSeek). A demanded call is structured output. Next to read: `reply.py`, which finds calls in
answers, and `quire/text/tool_calls/`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.server.protocol.tools import Offer
from quire.structured_outputs import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer
from quire.text.tool_calls.formats import GENERIC, GLM, ToolCallFormat, choose_format, uses_tools
from quire.text.tool_calls.requests import text_parameters, tool_choice_schema, tool_names, tools_system_prompt

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
"""In the format of the chat API."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Settings of one request's calls.

    Fields:
        text_parameters: by tool, those that are declared as text.
        schema: of an answer that is only the demanded calls; None if no call is demanded.
        is_named: the request demands one tool by name; the finish reason then stays "stop".
        is_parallel: False keeps the first call only.
    """

    format: ToolCallFormat
    names: frozenset[str]
    text_parameters: Mapping[str, frozenset[str]]
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
    names, texts = frozenset(tool_names(offer.tools)), text_parameters(offer.tools)
    return ToolUse(call_format, names, texts, schema, isinstance(offer.choice, Mapping), is_parallel)


def fields_of(use: ToolUse | None) -> dict[str, str]:
    """Return names for `renaming`: the schema of a demanded call came as `tools`."""
    return {} if use is None or use.schema is None else {"structured_outputs": "tools"}


def messages_with_tools(template: str | None, messages: Messages, tools: Tools | None) -> Messages:
    """Return messages in the format that the template reads. Mutates: `messages`."""
    call_format = choose_format(template)
    if call_format is GLM:
        return [turn for message in messages for turn in _glm_turns(message)]
    if uses_tools(template):
        for message in messages:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        return messages
    for message in messages:
        calls = None if call_format.example else message.pop("tool_calls", None)
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
    description = tools_system_prompt(tools, call_format.example)
    if messages and messages[0]["role"] in ("system", "developer") and isinstance(messages[0].get("content"), str):
        messages[0]["content"] += "\n\n" + description
        return messages
    return [{"role": "system", "content": description}, *messages]


def _glm_turns(message: dict[str, Any]) -> Messages:
    """Return the turns of a message as GLM-4 (0414) knows them: a call has its tool's name as `metadata`."""
    if message["role"] == "tool":
        return [{**message, "role": "observation"}]
    functions = [call["function"] for call in message.pop("tool_calls", None) or ()]
    turns = [{"role": "assistant", "metadata": called["name"], "content": called["arguments"]} for called in functions]
    return turns if turns and not message.get("content") else [message, *turns]


def _arguments(text: str) -> Any:
    """Return arguments as templates expect them: an object if the text is one, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
