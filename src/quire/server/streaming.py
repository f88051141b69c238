"""Server-sent events, encoded without a framework.

A chunk may cost the event loop a few microseconds only, because an engine makes over a thousand of them per second on
the same cores that compute: constant parts are encoded once per request (`TextEvent`), and one update of the engine is
one `send`. Next to read: `routes/job.py`.
"""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.engine.process.messages import RequestUpdate
from quire.server.caller import Caller, caller_of
from quire.server.errors import ApiError, ClientDisconnected
from quire.server.generation import generate, until_disconnect
from quire.server.state import ServerState, state_of
from quire.types import Request as EngineRequest

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


def event(content: object, name: str | None = None) -> bytes:
    """Return an event with `content` as JSON."""
    data = b"data: " + _encode(content) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class TextEvent:
    """An event with one variable text: the bytes before and after it are encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, content_with: Callable[[str], object], name: str | None = None) -> None:
        """`content_with` returns the event's content for a text; the text must occur once in it."""
        mark = uuid.uuid4().hex
        self._before, self._after = event(content_with(mark), name).split(_encode(mark))

    def encode(self, text: str) -> bytes:
        """Return the event with this text."""
        return self._before + _encode(text) + self._after


def error_event(error: ApiError) -> bytes:
    """Return the end of a stream that fails after its beginning: OpenAI's error object, then the usual end."""
    return event(error.body()) + DONE


class EventWriter(Protocol):
    """Writes the events of one answer; `index` is the position of an update's request in the answer."""

    def opening(self) -> bytes:
        """Return the events before the first update."""
        ...

    def of(self, index: int, update: RequestUpdate) -> bytes:
        """Return the events of an update."""
        ...

    def closing(self) -> bytes:
        """Return the events after the last update."""
        ...


async def stream_updates(
    state: ServerState, requests: Sequence[EngineRequest], caller: Caller, writer: EventWriter
) -> AsyncGenerator[bytes, None]:
    """Compute prepared requests, and write each update when it comes. Raises: as `generate`.

    The opening waits for the first update: until then an error is an ordinary answer.
    """
    data = writer.opening()
    async with aclosing(generate(state, requests, caller, streams=True)) as updates:
        async for index, update in updates:
            if update.prompt_logprobs is None:
                data += writer.of(index, update)
            else:  # may be tens of thousands of numbers: other streams would wait
                data += await state.supervisor.front_end.run(writer.of, index, update)
            if data:
                yield data
            data = b""
    data += writer.closing()
    if data:
        yield data


class EventStream(Response):
    """Sends the events that a generator yields.

    An error before the first event is an ordinary error answer; afterwards `on_error` makes an event of it. When the
    client disconnects, also while it does not read, the generator is closed at once.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_error: Callable[[ApiError], bytes] = error_event
    ) -> None:
        super().__init__()
        self._events = events
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with contextlib.suppress(ClientDisconnected, OSError):
            await until_disconnect(receive, self._pump(scope, receive, send))

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    if not has_started:
                        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                        has_started = True
                    await send(_body(data, more=True))
        except OSError:
            raise
        except Exception as error:
            answer = ApiError.of(error)
            if not has_started:
                return await answer.response()(scope, receive, send)
            await send(_body(self._on_error(answer), more=True))
        await send(_body(b"", more=False))


def stream_answer(
    request: Request,
    requests: Sequence[EngineRequest],
    writer: EventWriter,
    on_error: Callable[[ApiError], bytes] = error_event,
) -> EventStream:
    """Return the answer that streams prepared requests."""
    return EventStream(stream_updates(state_of(request), requests, caller_of(request), writer), on_error)


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
