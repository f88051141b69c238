"""Routes for routers: what this server has cached and does, and the cached blocks that a request could use.

Next to read: `../announcements.py`, `../router/replica.py`.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.process.prefixes import prompt_digests
from quire.server.announcements import PromptPrefix
from quire.server.errors import ApiError, JsonResponse
from quire.server.generation import until_disconnect
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.fields import Body
from quire.server.protocol.messages import MessagesRequest
from quire.server.protocol.prompts import CompletionRequest
from quire.server.protocol.responses import ResponsesRequest
from quire.server.request_record import Caller, record_of
from quire.server.routes.chat import prepare_chat
from quire.server.routes.completions import prepare_completion
from quire.server.routes.exchange import caller_of, in_thread, read_body
from quire.server.routes.job import Job
from quire.server.routes.messages import MessageJob, prepare_message
from quire.server.routes.responses import ResponseJob, prepare_response
from quire.server.routing import RouteTable
from quire.server.state import ServerState, state_of
from quire.server.streaming import EventStream, EventWriter, event

router = RouteTable()


@router.get("/replica/events")
async def events(request: Request) -> Response:
    """Stream announcements."""
    return EventStream(_stream(state_of(request), record_of(request).client_id), EventWriter().failed)


async def _stream(state: ServerState, reader: str) -> AsyncGenerator[bytes, None]:
    async with aclosing(state.announcer.watch(reader)) as announcements:
        async for announcement in announcements:
            if state.is_draining:
                return
            yield event(announcement)


Preparer = Callable[[ServerState, Any, Caller], Coroutine[Any, Any, Job | ResponseJob | MessageJob]]
PREPARERS: dict[str, tuple[type[Body], Preparer]] = {
    "v1/chat/completions": (ChatRequest, prepare_chat),
    "v1/completions": (CompletionRequest, prepare_completion),
    "v1/responses": (ResponsesRequest, prepare_response),
    "v1/messages": (MessagesRequest, prepare_message),
}


@router.post("/replica/prefix/{path:path}")
async def prefix(request: Request) -> Response:
    """Return the digests of the first prompt of a request to the route `path`, which is not computed."""
    if (path := request.path_params["path"]) not in PREPARERS:
        raise ApiError(404, f"requests to /{path[:100]} have no prefix: there are {', '.join(PREPARERS)}",
                       code="route_not_found")  # fmt: skip
    kind, prepare = PREPARERS[path]
    body, state = await read_body(request, kind), state_of(request)
    job = await until_disconnect(request.receive, prepare(state, body, caller_of(request)))
    prepared = job.requests[0]
    block_size = state.engines.front_end.config.scheduler.block_size
    digests = ""
    if prepared.reads_prefix_cache:
        digests = (await in_thread(request, prompt_digests, prepared, block_size)).hex()
    return JsonResponse(PromptPrefix(block_size, prepared.num_prompt_tokens, digests))
