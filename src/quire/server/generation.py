"""Requests from admission to the last token, aborted when the client disconnects.

Every route that computes uses `generate` or `collect`: they enter admission, submit, and at the end, also after an
error, abort the unfinished requests and leave admission. The reader of each generator closes it (`aclosing`), so that
this happens at once and not when Python collects it. Next to read: `streaming.py`, `routes/chat.py`.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from quire.engine.process.messages import RequestUpdate, Submit
from quire.engine.process.stream import RequestStream
from quire.errors import DeadlineError, EngineDeadError, ModelFileError, UnsupportedModelError, printable
from quire.outputs import CompletionOutput
from quire.server.errors import ApiError, ClientDisconnected, shown
from quire.server.request_record import RequestRecord
from quire.server.state import ServerState
from quire.structured_outputs import STRUCTURED_OUTPUTS_FAILED
from quire.types import RequestSpec

LOGGER = logging.getLogger("quire.server")
UNUSABLE = (ModelFileError, UnsupportedModelError)
"""Errors of a request's adapter; those of the model end the engine's start."""
_R = TypeVar("_R")


def new_id(prefix: str) -> str:
    """Return an id such as "chatcmpl-5f0c…"."""
    return f"{prefix}-{uuid.uuid4().hex}"


def timestamp() -> int:
    """Return seconds since 1970, as in OpenAI's `created`."""
    return int(time.time())


Batch = list[tuple[int, RequestUpdate]]
"""Updates that came together, each with its request's position."""


async def generate(
    state: ServerState, requests: Sequence[RequestSpec], record: RequestRecord, *, streams: bool
) -> AsyncGenerator[Batch, None]:
    """Compute prepared requests; yield their updates. Those of one engine step come together, to be sent together.

    As many requests run at a time as `Admission.num_at_once` allows; the next starts when one ends.
    Closing the generator aborts the unfinished ones. Raises: ApiError, QuireError, for the first request that fails.
    """
    num_choices = 1 if requests[0].sampling is None else requests[0].sampling.n
    num_at_once = state.admission.num_at_once(len(requests), num_choices)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    timeout_s = state.options.request_timeout_s
    with state.admission.enter(record, num_prompt_tokens, num_at_once * num_choices) as place:
        updates = _compute(state, requests, record, num_at_once, streams=streams)
        record.begin("compute")
        try:
            async with asyncio.timeout(timeout_s or None), aclosing(updates):
                async for batch in updates:
                    for _, update in batch:
                        place.note(update)
                    yield batch
            record.begin("send")
        except UNUSABLE as error:
            raise unusable(record.adapter or "", error.message, param="model") from None
        except TimeoutError:
            raise ApiError(
                504,
                f"the request took longer than {timeout_s:g} s, the most that this server allows: ask for fewer tokens",
                code="request_timeout",
            ) from None


async def collect(state: ServerState, requests: Sequence[RequestSpec], record: RequestRecord) -> list[RequestUpdate]:
    """Compute prepared requests and return their final updates, which have all choices. Raises: as `generate`."""
    last: dict[int, RequestUpdate] = {}
    async with aclosing(generate(state, requests, record, streams=False)) as updates:
        async for batch in updates:
            last.update(batch)
    return [last[index] for index in range(len(requests))]


async def _compute(
    state: ServerState, requests: Sequence[RequestSpec], record: RequestRecord, num_at_once: int, *, streams: bool
) -> AsyncGenerator[Batch, None]:
    """Compute requests, `num_at_once` at a time. A slow reader finds several updates of a request merged."""
    engines, ready = state.engines, asyncio.Event()
    waiting, running = iter(enumerate(requests)), dict[int, RequestStream]()

    async def start(num: int) -> None:
        for index, request in islice(waiting, num):
            if index:  # later requests of a large batch arrive when earlier ones end: the queue timeout begins then
                request = msgspec.structs.replace(request, arrival_time_s=time.monotonic())
            message = Submit(request, streams, state.options.queue_timeout_s or None)
            running[index] = await engines.submit(message, ready)

    try:
        await start(num_at_once)
        if len(requests) == 1 and requests[0].sampling is not None and _reads_prefixes(state, requests[0]):
            # The engine computes meanwhile.
            caller = (requests[0].client_id, *requests[0].hash_extras)
            record.prefix_broke_at = await state.prefix_breaks.note(caller, requests[0].prompt_token_ids)
        while running:
            await ready.wait()
            batch = [(index, update) for index, stream in running.items() if (update := stream.take()) is not None]
            for index, update in batch:
                for choice in update.choices:
                    if choice.finish_reason in ("error", "abort"):
                        raise _failure(choice, record)
                if update.finished:
                    del running[index]
                    await start(1)
            if batch:
                yield batch
            else:  # only now: behind its last update a stream may have an error
                ready.clear()
    finally:
        for stream in running.values():
            engines.abort(stream)


def _reads_prefixes(state: ServerState, request: RequestSpec) -> bool:
    return request.reads_prefix_cache and state.engines.front_end.config.scheduler.enable_prefix_caching


def unusable(adapter: str, reason: str, *, param: str) -> ApiError:
    """Return the refusal of an adapter whose files cannot be used, and log the reason.

    The answer does not tell it: a client would learn which files there are on the server's machine.
    """
    LOGGER.warning("adapter %s cannot be used: %s", printable(adapter), printable(reason, limit=1000))
    message = f"adapter {shown(adapter)} cannot be used: its files are missing, changed or none of an adapter of this "
    return ApiError(400, message + "model; the server's log says more", code="adapter_unusable", param=param)


def _failure(choice: CompletionOutput, record: RequestRecord) -> ApiError:
    if choice.error_code in [kind.code for kind in UNUSABLE]:
        return unusable(record.adapter or "", choice.error or "", param="model")
    if choice.error_code == STRUCTURED_OUTPUTS_FAILED:
        return ApiError(
            400, choice.error or STRUCTURED_OUTPUTS_FAILED, code=STRUCTURED_OUTPUTS_FAILED, param="structured_outputs"
        )
    if choice.error_code == EngineDeadError.code:
        return ApiError.of(EngineDeadError(choice.error or "the engine stopped"))
    if choice.error_code == DeadlineError.code:
        return ApiError(504, choice.error or "", code="request_timeout", param="deadline_s")
    if choice.finish_reason == "error":
        return ApiError(500, choice.error or "the model failed on this request", code="generation_failed")
    return ApiError(503, "the server ended this request before it was complete", code="aborted", retry_after_s=2)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _R]) -> _R:
    """Await `work`; cancel it when the client disconnects. Raises: ClientDisconnected, and the errors of `work`."""
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
