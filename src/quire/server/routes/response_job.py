"""A request to `/v1/responses`, checked and tokenised: what both the whole answer and the stream are made from.

Next to read: `response_output.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.engine.process.messages import ChoiceUpdate
from quire.server.caller import Caller
from quire.server.front_end import FrontEnd
from quire.server.generation import new_id, timestamp
from quire.server.logprobs import LogprobWriter
from quire.server.protocol.forms import schema_field
from quire.server.protocol.response_items import chat_messages
from quire.server.protocol.responses import ResponsesRequest
from quire.server.routes.prepared import prepare_request, tool_use_of
from quire.server.routes.response_logprobs import TextLogprobs
from quire.server.tools import ToolUse
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer
from quire.types import Request


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """A request that has been checked and tokenised."""

    body: ResponsesRequest
    response_id: str
    created: int
    model: str
    request: Request
    tokenizer: Tokenizer
    writer: LogprobWriter | None
    tool_use: ToolUse | None

    def response(self, status: str, **changes: Any) -> dict[str, Any]:
        """The response object in one of its states."""
        body, sampling = self.body, self.request.sampling
        assert sampling is not None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": timestamp() if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._tool_choice(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        } | changes

    def _format(self) -> dict[str, Any]:
        text = self.body.text
        if text is None or text.format is None:
            return {"type": "text"}
        return text.format.model_dump(by_alias=True, exclude_unset=True)

    def _tool_choice(self) -> str | dict[str, Any]:
        choice = self.body.tool_choice
        if isinstance(choice, str | None):
            return choice or "auto"
        return choice.model_dump()

    def usage(self, num_generated: int, num_cached: int) -> dict[str, Any]:
        """The count of tokens."""
        num_prompt = self.request.num_prompt_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_generated,
        }

    def logprobs(self, choice: ChoiceUpdate) -> list[dict[str, Any]]:
        """The log-probabilities of what is new; none where they were not asked for."""
        if self.writer is None:
            return []
        content: list[dict[str, Any]] = self.writer.chat(choice.logprobs or [])["content"]
        return content

    def text_logprobs(self) -> TextLogprobs | None:
        """For an answer in which calls may stand beside text; None where log-probabilities were not asked for."""
        if self.writer is None:
            return None
        prompt, sampling = self.request.prompt_token_ids, self.request.sampling
        assert sampling is not None
        skips = sampling.skip_special_tokens
        return TextLogprobs(IncrementalDetokenizer(self.tokenizer, prompt, skip_special_tokens=skips))


def prepare_response(front_end: FrontEnd, body: ResponsesRequest, caller: Caller, model: str) -> ResponseJob:
    """Render, tokenise and check. Raises: RequestError."""
    chosen = body.sampling_values()
    if body.max_output_tokens is not None:
        chosen["max_tokens"] = body.max_output_tokens
    writer = None
    if body.wants_logprobs:
        chosen["logprobs"] = body.top_logprobs or 0
        writer = LogprobWriter(front_end.tokenizer, body.top_logprobs or 0, as_ids=False)
    offer = body.offer()
    tool_use = tool_use_of(front_end, body)
    prompt = front_end.chat_prompt(
        _messages(body),
        tools=None if offer is None else offer.tools,
        variables=body.chat_template_kwargs,
        max_len=front_end.max_prompt_len(body.truncate_prompt_tokens, body.max_output_tokens),
        keeps_start=body.keeps_start,
    )
    names = dict.fromkeys(schema_field(body.response_format), "text.format.schema")
    request = prepare_request(front_end, body, caller, prompt, chosen, tool_use, kind="resp", names=names)
    response_id = f"resp_{body.request_id}" if body.request_id else item_id("resp")
    return ResponseJob(body, response_id, timestamp(), model, request, front_end.tokenizer, writer, tool_use)


def item_id(prefix: str) -> str:
    """A name such as "msg_5f0c…": this API writes them with a line below."""
    return new_id(prefix).replace("-", "_")


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    return [*messages, *chat_messages(body.input)]
