"""Server-sent events: bytes that are ready to be sent, and nothing of a framework between them and the socket.

Next to read: `routes/chat.py`.
"""

import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.server.errors import ApiError
from quire.server.generation import ClientDisconnected, until_disconnect

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(content: object, name: str | None = None) -> bytes:
    """One event whose data is `content` as JSON."""
    data = b"data: " + msgspec.json.encode(content) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class EventStream(Response):
    """Sends what an iterator yields.

    An error before the first event is an ordinary error answer; afterwards it is an event of its own, and the stream
    ends as always. When the client leaves, the iterator is closed.
    """

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with contextlib.suppress(ClientDisconnected, OSError):
            await until_disconnect(receive, self._pump(scope, receive, send))

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        try:
            async for data in self._events:
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
            await send(_body(event(answer.body()) + DONE, more=True))
        await send(_body(b"", more=False))


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
