"""Requests from their check to their last token, and away with them when their client leaves.

Every route that computes goes through `generate` or `collect`: they take a place in the queue, submit, and in the end,
however that comes, abort what still runs and give the place back. Every generator here is closed by whoever reads it
(`aclosing`), so that this happens at once and not when Python collects it. Next to read: `streaming.py`,
`routes/chat.py`.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.types import Receive

from quire.engine.process.messages import ChoiceUpdate, RequestUpdate, Submit
from quire.outputs import PositionLogprobs
from quire.server.caller import Caller
from quire.server.errors import ApiError, ClientDisconnected
from quire.server.state import ServerState
from quire.structured_outputs import FORM_FAILED
from quire.types import Request

_R = TypeVar("_R")
UPDATES_AHEAD = 4
"""Of several prompts' updates, so many wait for a slow reader; further ones wait in their `RequestStream`."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All that one request got: its choices by index, its last update, and its prompt's log-probabilities."""

    choices: list[ChoiceUpdate]
    last: RequestUpdate
    prompt_logprobs: list[PositionLogprobs | None] | None = None

    @property
    def num_generated(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


def new_id(prefix: str) -> str:
    """A name such as "chatcmpl-5f0c…"."""
    return f"{prefix}-{uuid.uuid4().hex}"


def timestamp() -> int:
    """Seconds since 1970, as OpenAI's `created`."""
    return int(time.time())


async def generate(
    state: ServerState, requests: Sequence[Request], caller: Caller, *, streams: bool
) -> AsyncGenerator[tuple[int, RequestUpdate], None]:
    """Compute prepared requests at once: updates as they come, each with its request's position in `requests`.

    Closing the generator aborts what still runs. Raises: ApiError, QuireError, for the first request that fails.
    """
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    num_completions = sum(1 + len(request.siblings) for request in requests)
    num_allowed = sum(request.max_tokens * (1 + len(request.siblings)) for request in requests)
    with state.admission.enter(caller, num_prompt_tokens, num_completions, num_allowed) as place:
        several = _compute_all(state, requests, streams=streams) if len(requests) > 1 else None
        updates = several or _numbered(_compute(state, requests[0], streams=streams))
        async with aclosing(updates):
            async for item in updates:
                place.note(item[1])
                yield item


async def collect(state: ServerState, requests: Sequence[Request], caller: Caller) -> list[Finished]:
    """Compute prepared requests to their ends. Raises: as `generate`."""
    choices: list[dict[int, ChoiceUpdate]] = [{} for _ in requests]
    last: dict[int, RequestUpdate] = {}
    of_prompts: list[list[PositionLogprobs | None] | None] = [None] * len(requests)
    async with aclosing(generate(state, requests, caller, streams=False)) as updates:
        async for index, update in updates:
            choices[index] |= {choice.index: choice for choice in update.choices}
            last[index] = update
            of_prompts[index] = of_prompts[index] or update.prompt_logprobs
    return [
        Finished([found[key] for key in sorted(found)], last[index], of_prompts[index])
        for index, found in enumerate(choices)
    ]


async def _numbered(updates: AsyncGenerator[RequestUpdate, None]) -> AsyncGenerator[tuple[int, RequestUpdate], None]:
    async with aclosing(updates):
        async for update in updates:
            yield 0, update


async def _compute_all(
    state: ServerState, requests: Sequence[Request], *, streams: bool
) -> AsyncGenerator[tuple[int, RequestUpdate], None]:
    queue: asyncio.Queue[tuple[int, RequestUpdate | Exception]] = asyncio.Queue(UPDATES_AHEAD)

    async def pump(index: int, request: Request) -> None:
        try:
            async with aclosing(_compute(state, request, streams=streams)) as updates:
                async for update in updates:
                    await queue.put((index, update))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item.finished
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
            request.hash_extras[0],
            request.arrival_time_s,
            streams,
            state.options.queue_timeout_s or None,
            state.supervisor.front_end.checked_grammar(request),
        )
    )
    try:
        async with aclosing(cast(AsyncGenerator[RequestUpdate, None], aiter(stream))) as updates:
            async for update in updates:
                for choice in update.choices:
                    if choice.finish_reason in ("error", "abort"):
                        raise _failure(choice)
                yield update
    finally:
        client.abort(stream)


def _failure(choice: ChoiceUpdate) -> ApiError:
    if choice.error_code == FORM_FAILED:
        return ApiError(400, choice.error or FORM_FAILED, code=FORM_FAILED, param="structured_outputs")
    if choice.finish_reason == "error":
        return ApiError(500, choice.error or "the model failed on this request", code="generation_failed")
    return ApiError(503, "the server ended this request before it was complete", code="aborted", retry_after_s=2)


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
