"""A chat request, checked and tokenised: what both the whole answer and the stream are made from.

Next to read: `chat.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.server.caller import Caller
from quire.server.front_end import FrontEnd, PromptTokens
from quire.server.generation import new_id, timestamp
from quire.server.logprobs import LogprobWriter
from quire.server.protocol.chat import ChatRequest, Message
from quire.server.protocol.forms import form_of, renaming, schema_field
from quire.server.tools import ToolUse, messages_with_tools, plan_tools
from quire.structured_outputs import StructuredOutputsParams
from quire.text.tool_calls.formats import uses_tools
from quire.types import Request


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat request that has been checked and tokenised.

    `opening` is put in front of every answer: the message that `echo` repeats.
    """

    body: ChatRequest
    answer_id: str
    created: int
    request: Request
    prompt: PromptTokens
    opening: str
    tool_use: ToolUse | None

    def logprob_writer(self, front_end: FrontEnd) -> LogprobWriter | None:
        """Writes this answer's log-probabilities, if any are wanted."""
        if not self.body.logprobs:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return LogprobWriter(front_end.tokenizer, self.body.top_logprobs or 0, as_ids=as_ids)


def prepare_chat(front_end: FrontEnd, body: ChatRequest, caller: Caller) -> ChatJob:
    """Render, tokenise and check. Raises: RequestError."""
    chosen = body.sampling_values()
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None:
        chosen["max_tokens"] = max_tokens
    if body.logprobs:
        chosen["logprobs"] = body.top_logprobs or 0
    tools = None
    if body.tools is not None and body.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    tool_use = None if tools is None else _tool_use(front_end, body, tools)
    if tool_use is not None and tool_use.format.has_special_marker:
        chosen["skip_special_tokens"] = False
    prompt = front_end.chat_prompt(
        messages_with_tools(front_end.template, template_messages(body.messages), tools),
        tools=tools if uses_tools(front_end.template) else None,
        add_generation_prompt=add_generation_prompt(body.add_generation_prompt, body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
        variables={**(body.chat_template_kwargs or {}), "documents": body.documents},
        add_special_tokens=bool(body.add_special_tokens),
        max_len=front_end.max_prompt_len(body.truncate_prompt_tokens, max_tokens),
    )
    names = {"logprobs": "top_logprobs", **schema_field(body.response_format)}
    if tool_use is not None and tool_use.schema is not None:
        names["structured_outputs"] = "tools"
    with renaming(names):
        chosen["structured_outputs"] = _form(body, tool_use)
        request = front_end.prepare(
            new_id("chat"),
            prompt,
            front_end.sampling_params(chosen),
            **caller.identity(body.priority, body.cache_salt),
        )
    answer_id = f"chatcmpl-{body.request_id}" if body.request_id else new_id("chatcmpl")
    return ChatJob(body, answer_id, timestamp(), request, prompt, _opening(body), tool_use)


def _tool_use(front_end: FrontEnd, body: ChatRequest, tools: list[dict[str, Any]]) -> ToolUse:
    choice = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()
    is_parallel = body.parallel_tool_calls is not False
    return plan_tools(front_end.template, front_end.tokenizer, tools, choice, is_parallel=is_parallel)


def _form(body: ChatRequest, tool_use: ToolUse | None) -> StructuredOutputsParams | None:
    if tool_use is not None and tool_use.schema is not None:
        return StructuredOutputsParams(json=tool_use.schema)
    return form_of(body.response_format, body.structured_outputs)


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template reads them."""
    found = [message.model_dump(exclude_none=True, exclude={"annotations"}) for message in messages]
    for message in found:
        # Templates ask for it; a message may leave it out.
        message.setdefault("content", "")
    return found


def add_generation_prompt(chosen: bool | None, continue_final_message: bool | None) -> bool:
    """Whether the prompt ends with the beginning of the assistant's turn."""
    return not continue_final_message if chosen is None else chosen


def _opening(body: ChatRequest) -> str:
    last = body.messages[-1]
    if not body.echo or last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)
