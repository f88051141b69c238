"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API: an adapter of chat.

A request becomes a chat request; the answer's reasoning, text and calls become blocks of content. A whole answer has
the blocks, a stream also their events; both are the same for any cut of the text into updates.
Next to read: `chat.py`, `../protocol/messages.py`.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.process.messages import RequestUpdate
from quire.outputs import CompletionOutput
from quire.server.errors import MESSAGES_PATH, ApiError, JsonResponse
from quire.server.protocol.fields import MAX_INTEGER, renaming
from quire.server.protocol.message_blocks import shown_call_id
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.request_record import Caller, record_of
from quire.server.routes.chat import ChatJob, dialogue_options, message_dicts, prepare_chat
from quire.server.routes.exchange import answer, in_thread, prepare, read_body
from quire.server.routing import RouteTable
from quire.server.state import ServerState, state_of
from quire.server.streaming import EventWriter, event, stream_answer
from quire.text.reply import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from quire.types import RequestSpec as EngineRequest

router = RouteTable()
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format.schema"}
"""Fields of the chat request → fields of this API, for errors."""


@router.post(MESSAGES_PATH)
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, MessagesRequest)
    job = await prepare(request, body, prepare_message, n=1)
    if body.stream:
        return stream_answer(request, job.requests, _MessageEvents(job, record_of(request).request_id))
    return await answer(request, job.requests, lambda results: _written(job, results))


@router.post(MESSAGES_PATH + "/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt without computing it."""
    body = await read_body(request, CountTokensRequest)
    return JsonResponse({"input_tokens": await in_thread(request, _num_tokens, state_of(request), body)})


async def prepare_message(state: ServerState, body: MessagesRequest, caller: Caller) -> "MessageJob":
    """Prepare the chat request that this one means. Raises: as `prepare_chat`."""
    with renaming(NAMES):
        return MessageJob(body, await prepare_chat(state, body.chat, caller))


def _num_tokens(state: ServerState, body: CountTokensRequest) -> int:
    chat = body.chat
    offer, options = chat.offer(), dialogue_options(state, chat, None)
    tools = None if offer is None else offer.tools
    with renaming(NAMES):
        # Without a limit: an agent that counts wants to know how far a conversation is above it.
        prepared, _ = state.engines.front_end.chat_prompt(
            message_dicts(chat.messages), tools, options, max_len=MAX_INTEGER
        )
    return len(prepared.token_ids)


@dataclass(frozen=True, slots=True)
class MessageJob:
    """A request to `/v1/messages`, and the chat job that it became."""

    body: MessagesRequest
    chat: ChatJob

    @property
    def requests(self) -> list[EngineRequest]:
        """Return the request to the engine."""
        return self.chat.requests

    def message(self, usage: dict[str, int], **changes: Any) -> dict[str, Any]:
        """Return the message in one of its states."""
        return {
            "id": self.chat.answer_id.replace("chatcmpl-", "msg_", 1),
            "type": "message",
            "role": "assistant",
            "model": self.chat.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        } | changes

    def usage(self, num_generated: int, update: RequestUpdate) -> dict[str, int]:
        """Return Anthropic's token counts, in which cached tokens are no input tokens."""
        num_cached = update.num_cached_tokens
        return {
            "input_tokens": self.requests[0].num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_generated,
        }

    def ending(self, blocks: list[dict[str, Any]], choice: CompletionOutput) -> dict[str, Any]:
        """Return the reason of the end as fields."""
        reason, sequence = "end_turn", None
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif isinstance(choice.stop_reason, str) and choice.stop_reason in (self.body.stop or ()):
            reason, sequence = "stop_sequence", choice.stop_reason
        elif any(block["type"] == "tool_use" for block in blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _written(job: MessageJob, results: list[RequestUpdate]) -> dict[str, Any]:
    (last,) = results
    (choice,) = last.choices
    content = MessageContent(job)
    content.write(choice)
    usage = job.usage(content.num_generated, last)
    return job.message(usage, content=content.blocks, **job.ending(content.blocks, choice))


class MessageContent:
    """Makes blocks from text: thinking, text, and calls of tools.

    `blocks`: complete ones, and at the end the one in progress. `emit` gets the type and content of each event.
    """

    def __init__(self, job: MessageJob, emit: Callable[[str, dict[str, Any]], None] = lambda kind, content: None):
        self.blocks: list[dict[str, Any]] = []
        self.num_generated = 0
        self._emit = emit
        self._reader = job.chat.reader()
        self._is_open = False
        self._arguments = ""

    def write(self, choice: CompletionOutput) -> None:
        """Add new text. Mutates: the blocks."""
        ends = choice.finish_reason is not None
        self.num_generated += len(choice.token_ids)
        if self._reader is not None:
            found = self._reader.events(choice.text, ends=ends)
        else:
            found = [ContentDelta(choice.text, 0)] if choice.text else []
        for item in found:
            if isinstance(item, ReasoningDelta):
                self._add("thinking", item.text)
            elif isinstance(item, ContentDelta):
                self._add("text", item.text)
            elif isinstance(item, ToolCallStart):
                self._start({"type": "tool_use", "id": shown_call_id(item.id), "name": item.name, "input": {}})
            elif isinstance(item, ToolArgumentsDelta):
                self._arguments += item.text
                self._emit_delta({"type": "input_json_delta", "partial_json": item.text})
        if ends:
            self._end()

    def _add(self, kind: str, text: str) -> None:
        if not self._is_open or self.blocks[-1]["type"] != kind:
            self._start({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self.blocks[-1][kind] += text
        self._emit_delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: dict[str, Any]) -> None:
        self._end()
        self.blocks.append(block)
        self._is_open, self._arguments = True, ""
        self._emit("content_block_start", {"index": len(self.blocks) - 1, "content_block": block})

    def _end(self) -> None:
        """End the block in progress, if there is one."""
        if not self._is_open:
            return
        block = self.blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = json.loads(self._arguments or "{}")
        elif block["type"] == "thinking":
            block["signature"] = _signature(block["thinking"])
            self._emit_delta({"type": "signature_delta", "signature": block["signature"]})
        self._emit("content_block_stop", {"index": len(self.blocks) - 1})
        self._is_open = False

    def _emit_delta(self, delta: dict[str, Any]) -> None:
        self._emit("content_block_delta", {"index": len(self.blocks) - 1, "delta": delta})


def _signature(text: str) -> str:
    """Return a digest of reasoning: clients expect a signature, and send it back; nothing checks it."""
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()


class _MessageEvents(EventWriter):
    """Writes one message as typed events, from `message_start` to `message_stop`."""

    def __init__(self, job: MessageJob, request_id: str) -> None:
        self._job = job
        self._request_id = request_id
        self._content = MessageContent(job, self._emit)
        self._data: list[bytes] = []
        self._has_begun = self._has_ping = False

    def of(self, index: int, update: RequestUpdate) -> bytes:
        """Return the events of an update, of which the first has the usage of the prompt. Mutates: the blocks."""
        if not self._has_begun:
            self._has_begun = True
            self._emit("message_start", {"message": self._job.message(self._job.usage(0, update))})
        for choice in update.choices:
            self._content.write(choice)
            if choice.finish_reason is not None:
                usage = self._job.usage(self._content.num_generated, update)
                ending = self._job.ending(self._content.blocks, choice)
                self._emit("message_delta", {"delta": ending, "usage": usage})
                self._emit("message_stop", {})
        data = b"".join(self._data)
        self._data.clear()
        return data

    def closing(self) -> bytes:
        """Return nothing: `message_stop` was the end."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the event for an error in a stream that has begun."""
        return event(error.messages_body(self._request_id), "error")

    def _emit(self, kind: str, content: dict[str, Any]) -> None:
        self._data.append(event({"type": kind, **content}, kind))
        if kind == "content_block_start" and not self._has_ping:
            self._has_ping = True
            self._emit("ping", {})
