"""A chat request, checked and tokenised: what both the whole answer and the stream are made from.

Next to read: `prepared.py`, `chat.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.server.caller import Caller
from quire.server.front_end import FrontEnd, PromptTokens
from quire.server.generation import new_id, timestamp
from quire.server.logprobs import LogprobWriter
from quire.server.protocol.chat import ChatRequest, Message
from quire.server.protocol.forms import schema_field
from quire.server.routes.prepared import prepare_request, tool_use_of
from quire.server.tools import ToolUse
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
    offer = body.offer()
    tool_use = tool_use_of(front_end, body)
    prompt = front_end.chat_prompt(
        template_messages(body.messages),
        tools=None if offer is None else offer.tools,
        add_generation_prompt=add_generation_prompt(body.add_generation_prompt, body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
        variables={**(body.chat_template_kwargs or {}), "documents": body.documents},
        add_special_tokens=bool(body.add_special_tokens),
        max_len=front_end.max_prompt_len(body.truncate_prompt_tokens, max_tokens),
        keeps_start=body.keeps_start,
    )
    names = schema_field(body.response_format)
    request = prepare_request(front_end, body, caller, prompt, chosen, tool_use, kind="chat", names=names)
    answer_id = f"chatcmpl-{body.request_id}" if body.request_id else new_id("chatcmpl")
    return ChatJob(body, answer_id, timestamp(), request, prompt, _opening(body), tool_use)


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
