"""`POST /v1/responses`: an adapter of chat. A request becomes a chat request, and the answer's text and calls items.

A whole answer has the items, a stream also their events; both are the same for any cut of the text into updates.
Nothing is stored, so there is no route to read a response again. Next to read: `chat.py`, `../protocol/responses.py`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.process.messages import RequestUpdate
from quire.outputs import CompletionOutput
from quire.server.errors import ApiError
from quire.server.generation import new_id, timestamp
from quire.server.logprobs import TextLogprobs
from quire.server.protocol.chat import ReasoningOptions
from quire.server.protocol.fields import renaming
from quire.server.protocol.response_tools import namespaces
from quire.server.protocol.responses import ResponsesRequest
from quire.server.request_record import Caller
from quire.server.routes.chat import ChatJob, prepare_chat
from quire.server.routes.exchange import answer, prepare, read_body
from quire.server.routing import RouteTable
from quire.server.state import ServerState
from quire.server.streaming import EventWriter, event, stream_answer
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.reply import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from quire.types import RequestSpec as EngineRequest

router = RouteTable()
_encode = msgspec.json.Encoder().encode


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a text or a conversation."""
    body = await read_body(request, ResponsesRequest)
    job = await prepare(request, body, prepare_response, n=1)
    if body.stream:
        return stream_answer(request, job.requests, _ResponseEvents(job))
    return await answer(request, job.requests, lambda results: _written(job, results))


async def prepare_response(state: ServerState, body: ResponsesRequest, caller: Caller) -> "ResponseJob":
    """Prepare the chat request that this one means. Raises: as `prepare_chat`."""
    with renaming({"response_format": "text.format.schema"}):
        chat = await prepare_chat(state, body.chat, caller)
    return ResponseJob(body, chat, f"resp_{body.request_id}" if body.request_id else _item_id("resp"))


def _item_id(prefix: str) -> str:
    """Return an id such as "msg_5f0c…": this API's ids have an underscore."""
    return new_id(prefix).replace("-", "_")


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """A request to `/v1/responses`, and the chat job that it became."""

    body: ResponsesRequest
    chat: ChatJob
    response_id: str

    @property
    def requests(self) -> list[EngineRequest]:
        """Return the request to the engine."""
        return self.chat.requests

    def response(self, status: str, **changes: Any) -> dict[str, Any]:
        """Return the response object in one of its states."""
        body, sampling = self.body, self.requests[0].sampling
        assert sampling is not None
        text, choice = body.text, body.tool_choice
        text_format = None if text is None else text.format
        shown = {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True, exclude_unset=True)
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.chat.created,
            "completed_at": timestamp() if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.chat.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": (body.reasoning or ReasoningOptions()).model_dump(include={"effort", "summary"}),
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": shown},
            "tool_choice": (choice or "auto") if isinstance(choice, str | None) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        } | changes

    def ended(self, output: "ResponseOutput", finish_reason: str | None, last: RequestUpdate) -> dict[str, Any]:
        """Return the response object at the end of its text."""
        num_prompt = self.chat.requests[0].num_prompt_tokens
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": last.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output.num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + output.num_generated,
        }
        status = "incomplete" if finish_reason == "length" else "completed"
        return self.response(status, output=output.items, usage=usage)

    def text_logprobs(self) -> TextLogprobs | None:
        """Return the log-probabilities by place in the text; None if they are not wanted."""
        writer, request = self.chat.logprob_writer(), self.chat.requests[0]
        if writer is None or request.sampling is None:
            return None
        skips = request.sampling.skip_special_tokens
        tokenizer, prompt = self.chat.front_end.tokenizer, request.prompt_token_ids
        return TextLogprobs(writer, IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skips))


def _written(job: ResponseJob, results: list[RequestUpdate]) -> dict[str, Any]:
    (last,) = results
    (choice,) = last.choices
    output = ResponseOutput(job)
    output.write(choice)
    return job.ended(output, choice.finish_reason, last)


class ResponseOutput:
    """Makes items from text: reasoning, messages, and calls of functions.

    `items`: complete ones, and at the end the one in progress. `emit` gets the type and content of each event.
    """

    def __init__(self, job: ResponseJob, emit: Callable[[str, dict[str, Any]], None] = lambda kind, content: None):
        self.items: list[dict[str, Any]] = []
        self.num_generated = 0
        self._emit = emit
        self._reader = job.chat.reader()
        self._namespaces = namespaces(job.body.tools)
        self._logprobs = job.text_logprobs()
        self._num_chars = 0

    def begin(self) -> None:
        """Start the message of an answer without tools and reasoning, before its first text."""
        if self._reader is None:
            self._start_message()

    def write(self, choice: CompletionOutput) -> None:
        """Add new text. Mutates: the items."""
        ends = choice.finish_reason is not None
        start = self._num_chars
        self._num_chars += len(choice.text)
        self.num_generated += len(choice.token_ids)
        if self._logprobs is not None:
            self._logprobs.add(choice)
        if self._reader is not None:
            found = self._reader.events(choice.text, ends=ends)
        else:
            found = [ContentDelta(choice.text, start)] if choice.text else []
        for item in found:
            if isinstance(item, ReasoningDelta):
                self._add_reasoning(item.text)
            elif isinstance(item, ToolCallStart):
                self._start_call(item)
            elif isinstance(item, ToolArgumentsDelta):
                self.items[-1]["arguments"] += item.text
                self._emit("response.function_call_arguments.delta", {**self._place(), "delta": item.text})
            else:
                entries = [] if self._logprobs is None else self._logprobs.take(item.start, item.start + len(item.text))
                self._add_text(item.text, entries)
        if ends:
            rest = [] if self._logprobs is None else self._logprobs.take_rest(self._num_chars)
            if rest or not self.items or (self.items[-1]["type"] == "reasoning" and choice.finish_reason != "length"):
                self._add_text("", rest)
            self._end(is_cut=choice.finish_reason == "length")

    def _start(self, item: dict[str, Any]) -> None:
        self._end(is_cut=False)
        self.items.append(item)
        self._emit("response.output_item.added", {"output_index": len(self.items) - 1, "item": item})

    def _start_call(self, start: ToolCallStart) -> None:
        namespace, name = self._namespaces.get(start.name, (None, start.name))
        self._start(
            {
                "type": "function_call",
                "id": _item_id("fc"),
                "call_id": start.id,
                "name": name,
                **({"namespace": namespace} if namespace else {}),
                "arguments": "",
                "status": "in_progress",
            }
        )

    def _start_message(self) -> None:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._start_content({"type": "message", "id": _item_id("msg"), "role": "assistant"}, part)

    def _start_content(self, item: dict[str, Any], part: dict[str, Any]) -> None:
        self._start({**item, "content": [], "status": "in_progress"})
        self.items[-1]["content"].append(part)
        self._emit("response.content_part.added", {**self._place(), "part": part})

    def _add_reasoning(self, text: str) -> None:
        if not self.items:
            item = {"type": "reasoning", "id": _item_id("rs"), "summary": []}
            self._start_content(item, {"type": "reasoning_text", "text": ""})
        self.items[-1]["content"][0]["text"] += text
        self._emit("response.reasoning_text.delta", {**self._place(), "delta": text})

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        if not self.items or self.items[-1]["type"] != "message":
            self._start_message()
        (part,) = self.items[-1]["content"]
        part["text"] += text
        written = [msgspec.Raw(_encode(entry)) for entry in logprobs]  # a tenth of the memory, and four events have it
        part["logprobs"] += written
        if text or logprobs:
            self._emit("response.output_text.delta", {**self._place(), "delta": text, "logprobs": written})

    def _end(self, *, is_cut: bool) -> None:
        """End the item in progress, if any. is_cut: the text was cut off in it."""
        if not self.items:
            return
        item = self.items[-1]
        if item["type"] == "function_call":
            arguments = item["arguments"]
            done = {**self._place(), "name": item["name"], "arguments": arguments}
            self._emit("response.function_call_arguments.done", done)
            # The arguments may be whole though the text was cut off after them, or broken though it was not.
            item["status"] = "completed" if _is_json(arguments) else "incomplete"
        else:
            (part,) = item["content"]
            done = self._place() | {name: part[name] for name in ("text", "logprobs") if name in part}
            self._emit(f"response.{part['type']}.done", done)
            self._emit("response.content_part.done", {**self._place(), "part": part})
            item["status"] = "incomplete" if is_cut else "completed"
        self._emit("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})

    def _place(self) -> dict[str, Any]:
        item, index = self.items[-1], len(self.items) - 1
        place = {"item_id": item["id"], "output_index": index}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _ResponseEvents(EventWriter):
    """Writes one response as typed, numbered events, up to `response.completed`, `.incomplete` or `.failed`."""

    def __init__(self, job: ResponseJob) -> None:
        self._job = job
        self._output = ResponseOutput(job, self._emit)
        self._number = 0
        self._data: list[bytes] = []

    def opening(self) -> bytes:
        """Return the events before the first text."""
        started = self._job.response("in_progress")
        self._emit("response.created", {"response": started})
        self._emit("response.in_progress", {"response": started})
        self._output.begin()
        return self._taken()

    def of(self, index: int, update: RequestUpdate) -> bytes:
        """Return the events of an update. Mutates: the items and the number of events so far."""
        for choice in update.choices:
            self._output.write(choice)
            if choice.finish_reason is not None:
                response = self._job.ended(self._output, choice.finish_reason, update)
                self._emit(f"response.{response['status']}", {"response": response})
        return self._taken()

    def closing(self) -> bytes:
        """Return nothing: the type of the last event shows the end."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the event for an error in a stream that has begun: clients know few codes, ours is in the message."""
        code = (
            "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status < 500 else "server_error"
        )
        content = {"code": code, "message": f"{error.message} ({error.code})" if error.code else error.message}
        self._emit("response.failed", {"response": self._job.response("failed", error=content)})
        return self._taken()

    def _emit(self, kind: str, content: dict[str, Any]) -> None:
        self._data.append(event({"type": kind, "sequence_number": self._number, **content}, kind))
        self._number += 1

    def _taken(self) -> bytes:
        data = b"".join(self._data)
        self._data.clear()
        return data
