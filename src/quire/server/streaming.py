"""Server-sent events: bytes that are ready to be sent, and nothing of a framework between them and the socket.

A chunk costs the event loop a few microseconds, because an engine makes over a thousand of them per second on the same
cores that compute: what does not change is encoded once per request (`TextEvent`), and one update of the engine is one
`send`. Next to read: `routes/chat_stream.py`.
"""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.engine.process.messages import RequestUpdate
from quire.server.caller import Caller
from quire.server.errors import ApiError, ClientDisconnected
from quire.server.generation import generate, until_disconnect
from quire.server.state import ServerState
from quire.types import Request

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


def event(content: object, name: str | None = None) -> bytes:
    """One event whose data is `content` as JSON."""
    data = b"data: " + _encode(content) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class TextEvent:
    """An event of which nothing changes but one text: the bytes before and after it are made once."""

    __slots__ = ("_after", "_before")

    def __init__(self, content_with: Callable[[str], object], name: str | None = None) -> None:
        """`content_with` gives the event's content for a text; it must have the text once."""
        mark = uuid.uuid4().hex
        self._before, self._after = event(content_with(mark), name).split(_encode(mark))

    def encode(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + _encode(text) + self._after


def error_event(error: ApiError) -> bytes:
    """How a stream that has begun tells of an error: OpenAI's error object, then the usual end."""
    return event(error.body()) + DONE


class EventWriter(Protocol):
    """Makes the bytes of one answer's events; `index` is the update's request among those of the answer."""

    def opening(self) -> bytes:
        """What stands before the first update."""
        ...

    def of(self, index: int, update: RequestUpdate) -> bytes:
        """What an update brings."""
        ...

    def closing(self) -> bytes:
        """What stands behind the last one."""
        ...


async def stream_updates(
    state: ServerState, requests: Sequence[Request], caller: Caller, writer: EventWriter
) -> AsyncGenerator[bytes, None]:
    """Compute prepared requests, and write what comes as it comes. Raises: as `generate`.

    The opening waits for the first update: until then an error is an ordinary answer.
    """
    data = writer.opening()
    async with aclosing(generate(state, requests, caller, streams=True)) as updates:
        async for index, update in updates:
            if update.prompt_logprobs is None:
                data += writer.of(index, update)
            else:  # may be tens of thousands of numbers, and other streams would wait
                data += await state.supervisor.front_end.run(writer.of, index, update)
            if data:
                yield data
            data = b""
    data += writer.closing()
    if data:
        yield data


class EventStream(Response):
    """Sends what a generator yields.

    An error before the first event is an ordinary error answer; afterwards it is what `on_error` makes of it. When the
    client leaves, also while it does not read, the generator is closed at once.
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


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
