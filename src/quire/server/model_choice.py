"""ASGI layer of a server that loads models on demand: the `model` of a body chooses, and the request holds a lease.

The route takes the lease once it has checked the body, so that no model is loaded for a request that is refused: the
prompt is checked too if the model was loaded before, because its tokenizer stays. This layer stands between the gate,
which has read the body, and the application; a server of one model that stays loaded goes without it.
Next to read: `models.py`.
"""

import asyncio
import contextlib
from urllib.parse import parse_qsl

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import ConfigError
from quire.server.errors import ApiError
from quire.server.gate import QUEUED_PATHS
from quire.server.generation import until_disconnect
from quire.server.models import Models
from quire.server.options import parse_keep_alive
from quire.server.request_record import RECORD_KEY
from quire.server.state import LEASE_KEY, STATE_KEY

LARGE_BYTES = 64 << 10
"""Larger bodies are parsed in a thread: other streams would wait."""
PATHS = QUEUED_PATHS | {"/tokenize", "/detokenize"}


class Choice(msgspec.Struct):
    """Fields of a body that choose a model and the time for which it stays loaded."""

    model: str | None = None
    keep_alive: str | float | None = None

    @property
    def keep_alive_s(self) -> float | None:
        """The time in seconds; None if it is unset or wrong: the route refuses that."""
        with contextlib.suppress(ConfigError):
            return None if self.keep_alive is None else parse_keep_alive(self.keep_alive)
        return None


class ModelChoice:
    """The application, with the state of the chosen model in each request's scope."""

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["method"] == "GET" and scope["path"].startswith("/xray/"):
            return await self._show(scope, receive, send)
        if scope["method"] != "POST" or scope["path"] not in PATHS:
            return await self._app(scope, receive, send)
        message = await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                choice = await _choice(message["body"])
                model = self._models.find(choice.model)
                scope[STATE_KEY] = model.state
            except Exception as error:
                return await ApiError.of(error).response()(scope, receive, send)
            is_held = False

            async def lease(*, has_checked_prompt: bool) -> None:
                nonlocal is_held
                if not is_held and (has_checked_prompt or not model.state.supervisor.has_front_end):
                    entering = stack.enter_async_context(
                        self._models.lease(model, scope[RECORD_KEY], choice.keep_alive_s)
                    )
                    await (entering if model.is_open else until_disconnect(receive, entering))
                    is_held = True

            scope[LEASE_KEY] = lease
            await self._app(scope, _replayed(message, receive), send)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request of the live view, whose query may name a `model`. It holds no lease, and loads nothing."""
        try:
            name = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("model")
            scope[STATE_KEY] = self._models.find(name).state
        except ApiError as error:
            return await error.response()(scope, receive, send)
        await self._app(scope, receive, send)


async def _choice(body: bytes) -> Choice:
    """Return the choice of a body; that of a body which cannot be read is empty: the route refuses it."""
    decode = msgspec.json.Decoder(Choice).decode
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return await asyncio.to_thread(decode, body) if len(body) > LARGE_BYTES else decode(body)
    return Choice()


def _replayed(message: Message, receive: Receive) -> Receive:
    messages = [message]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
