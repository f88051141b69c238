"""`POST /v1/responses`: one message in answer to a text or a conversation, whole or as typed, numbered events.

Nothing is stored, so there is no route to read a response again. A stream ends with `response.completed`,
`response.incomplete` or `response.failed`. Next to read: `chat_job.py`, `../generation.py`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.engine.process.messages import ChoiceUpdate, RequestUpdate
from quire.server.caller import Caller, caller_of
from quire.server.errors import ApiError
from quire.server.front_end import FrontEnd
from quire.server.generation import Finished, collect, generate, new_id, timestamp, until_disconnect
from quire.server.logprobs import LogprobWriter
from quire.server.protocol.forms import form_of, renaming, schema_field
from quire.server.protocol.responses import InputMessage, ResponsesRequest
from quire.server.routes.body import check_model, json_answer, read_body
from quire.server.state import ServerState, state_of
from quire.server.streaming import EventStream, event
from quire.types import Request as EngineRequest

router = APIRouter()


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """A request that has been checked and tokenised."""

    body: ResponsesRequest
    response_id: str
    item_id: str
    created: int
    model: str
    request: EngineRequest
    writer: LogprobWriter | None

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
            "tool_choice": "none",
            "tools": [],
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

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message that is the response's output."""
        return {"type": "message", "id": self.item_id, "status": status, "role": "assistant", "content": content}

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


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of the message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a text or a conversation."""
    body = await read_body(request, ResponsesRequest)
    state, caller = state_of(request), caller_of(request)
    check_model(state, body.model)
    state.admission.check_room(caller, 1)
    front_end = state.supervisor.front_end
    job = await front_end.run(_prepare, front_end, body, caller, state.model_name)
    if body.stream:
        events = _Events(job)
        return EventStream(_stream(state, job, events, caller), events.failed)
    return await until_disconnect(request.receive, _answer(state, job, caller))


def _prepare(front_end: FrontEnd, body: ResponsesRequest, caller: Caller, model: str) -> ResponseJob:
    chosen = body.sampling_values()
    if body.max_output_tokens is not None:
        chosen["max_tokens"] = body.max_output_tokens
    writer = None
    if body.wants_logprobs:
        chosen["logprobs"] = body.top_logprobs or 0
        writer = LogprobWriter(front_end.tokenizer, body.top_logprobs or 0, as_ids=False)
    max_len = front_end.max_prompt_len(body.truncate_prompt_tokens, body.max_output_tokens)
    prompt = front_end.chat_prompt(_messages(body), max_len=max_len)
    names = dict.fromkeys(schema_field(body.response_format), "text.format.schema")
    with renaming({"logprobs": "top_logprobs", **names}):
        chosen["structured_outputs"] = form_of(body.response_format, body.structured_outputs)
        request = front_end.prepare(
            new_id("resp"),
            prompt,
            front_end.sampling_params(chosen),
            **caller.identity(body.priority, body.cache_salt),
        )
    response_id = f"resp_{body.request_id}" if body.request_id else new_id("resp").replace("-", "_")
    return ResponseJob(body, response_id, new_id("msg").replace("-", "_"), timestamp(), model, request, writer)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    return [*messages, *({"role": message.role, "content": _text(message)} for message in body.input)]


def _text(message: InputMessage) -> Any:
    if isinstance(message.content, str):
        return message.content
    return [{"type": "text", "text": part.text} for part in message.content]


def _status(choice: ChoiceUpdate) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


async def _answer(state: ServerState, job: ResponseJob, caller: Caller) -> Response:
    (finished,) = await collect(state, [job.request], caller)
    front_end = state.supervisor.front_end
    return await json_answer(front_end, lambda: _written(job, finished), is_large=job.writer is not None)


def _written(job: ResponseJob, finished: Finished) -> dict[str, Any]:
    (choice,) = finished.choices
    status = _status(choice)
    item = job.item(status, [text_part(choice.text, job.logprobs(choice))])
    usage = job.usage(finished.num_generated, finished.last.num_cached_tokens)
    return job.response(status, output=[item], usage=usage)


# --- Streams ----------------------------------------------------------------------------------


async def _stream(
    state: ServerState, job: ResponseJob, events: "_Events", caller: Caller
) -> AsyncGenerator[bytes, None]:
    data = events.opening()
    async with aclosing(generate(state, [job.request], caller, streams=True)) as updates:
        async for _, update in updates:
            data += events.of(update)
            if data:
                yield data
            data = b""


class _Events:
    """Makes the events of one response, numbers them, and keeps what the last ones repeat."""

    def __init__(self, job: ResponseJob) -> None:
        self._job = job
        self._number = 0
        self._num_generated = 0
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def opening(self) -> bytes:
        """The events before the first text."""
        job, place = self._job, self._place()
        started = job.response("in_progress")
        part = {**place, "part": text_part("", [])}
        return b"".join((
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
            self._event("response.output_item.added", output_index=0, item=job.item("in_progress", [])),
            self._event("response.content_part.added", **part),
        ))  # fmt: skip

    def of(self, update: RequestUpdate) -> bytes:
        """The events of what is new. Mutates: text, count of tokens and number of events so far."""
        data = b""
        for choice in update.choices:
            self._num_generated += len(choice.token_ids)
            logprobs = self._job.logprobs(choice)
            self._logprobs += logprobs
            if choice.text or logprobs:
                self._texts.append(choice.text)
                content = {**self._place(), "delta": choice.text, "logprobs": logprobs}
                data += self._event("response.output_text.delta", **content)
            if choice.finish_reason is not None:
                data += self._closing(choice, update)
        return data

    def failed(self, error: ApiError) -> bytes:
        """How a stream that has begun tells of an error."""
        content = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._job.response("failed", error=content))

    def _closing(self, choice: ChoiceUpdate, update: RequestUpdate) -> bytes:
        job, status, text = self._job, _status(choice), "".join(self._texts)
        part = text_part(text, self._logprobs)
        item = job.item(status, [part])
        usage = job.usage(self._num_generated, update.num_cached_tokens)
        return b"".join((
            self._event("response.output_text.done", **self._place(), text=text, logprobs=self._logprobs),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=job.response(status, output=[item], usage=usage)),
        ))  # fmt: skip

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._job.item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **content}, kind)
