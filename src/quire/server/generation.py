"""One request from its check to its last token, and away with it when its client leaves.

Every route that computes goes through `Generation`: it takes a place in the queue, submits, and in the end, however
that comes, aborts what still runs and gives the place back. Next to read: `streaming.py`, `routes/chat.py`.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from quire.engine.process.messages import RequestUpdate, Submit
from quire.server.caller import Caller
from quire.server.errors import ApiError
from quire.server.state import ServerState
from quire.types import Request

_R = TypeVar("_R")


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


def new_id(prefix: str) -> str:
    """A name such as "chatcmpl-5f0c…"."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def generate(
    state: ServerState, request: Request, caller: Caller, *, streams: bool
) -> AsyncGenerator[RequestUpdate, None]:
    """Compute one prepared request. Raises: ApiError, QuireError; closing the generator aborts the request."""
    with state.admission.enter(caller, request.num_prompt_tokens, 1 + len(request.siblings)) as place:
        async with aclosing(_compute(state, request, streams=streams)) as updates:
            async for update in updates:
                place.note(update)
                yield update


async def _compute(state: ServerState, request: Request, *, streams: bool) -> AsyncGenerator[RequestUpdate, None]:
    client = state.supervisor.client
    stream = client.submit(
        Submit(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            request.pooling,
            request.priority,
            request.client_id,
            request.cache_salt,
            request.arrival_time_s,
            streams,
            state.options.queue_timeout_s or None,
        )
    )
    try:
        async for update in stream:
            for choice in update.choices:
                if choice.finish_reason == "error":
                    raise ApiError(500, choice.error or "the model failed on this request", code="generation_failed")
            yield update
    finally:
        client.abort(stream)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _R]) -> _R:
    """Await `work`, but cancel it when the client leaves. Raises: ClientDisconnected, and what `work` raises."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for item in (watcher, task):
            if not item.done():
                item.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await item


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def timestamp() -> int:
    """Seconds since 1970, as OpenAI's `created`."""
    return int(time.time())
