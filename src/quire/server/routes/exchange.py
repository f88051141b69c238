"""Steps of every POST route: read and check the body, prepare it in a thread, compute and write the answer.

Pydantic's own errors have another shape, and it accepts what `protocol/validation.py` refuses.
Next to read: `../protocol/validation.py`, `../generation.py`.
"""

import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.process.messages import RequestUpdate
from quire.server.errors import ApiError, JsonResponse
from quire.server.generation import collect, until_disconnect
from quire.server.models import hold_model, models_of
from quire.server.protocol.fields import Body
from quire.server.protocol.validation import parse_body
from quire.server.request_record import Caller, record_of
from quire.server.routing import body_of
from quire.server.state import STATE_KEY, ServerState, state_of
from quire.types import RequestSpec as EngineRequest

LARGE_BYTES = 16 << 10
"""Larger bodies are parsed in a thread: the worst take some 10 ms, in which no other stream would get its tokens."""
MANY_REQUESTS = 8
MAX_SHARED_CHARACTERS = 8 << 20
"""Of a text that all prompts of a request share, added up: 4 s of work. A query of 2 MiB with 2,048 documents would
take an hour."""
_B = TypeVar("_B", bound=Body)
_J = TypeVar("_J")
_P = ParamSpec("_P")
_R = TypeVar("_R")


async def read_body(request: Request, kind: type[_B]) -> _B:
    """Return the checked request, whose `model` chooses the state of `state_of`.

    Raises: ApiError 400, 404 for another model, or 415; as `hold_model`.
    """
    media_type = request.headers.get("content-type", "")
    if media_type.partition(";")[0].strip().lower() != "application/json":
        given = json.dumps(media_type[:100]) if media_type else "none"
        message = f"the body must be JSON, with Content-Type: application/json; it has {given}"
        raise ApiError(415, message, code="unsupported_media_type")
    data = await body_of(request)
    record = record_of(request)
    record.num_bytes = len(data)
    is_large = len(data) > LARGE_BYTES
    body = await in_thread(request, parse_body, kind, data) if is_large else parse_body(kind, data)
    state, record.adapter = models_of(request).choose(getattr(body, "model", None))
    request.scope[STATE_KEY] = state
    if state.is_on_demand and not state.engines.has_front_end:  # without a tokenizer the prompt cannot be checked
        await hold_model(request, getattr(body, "keep_alive", None))
    return body


def served_name(request: Request) -> str:
    """Return the name under which an answer is given: of the adapter, else of the model."""
    return record_of(request).adapter or state_of(request).model_name


def caller_of(request: Request) -> Caller:
    """Return the caller of a request whose body has been read."""
    record = record_of(request)
    assert record.caller is not None
    return replace(record.caller, engine_id=record.engine_id, adapter=record.adapter, num_bytes=record.num_bytes)


async def in_thread(request: Request, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function that reads a request's body in a thread, unless the client leaves before its turn.

    Raises: QueueFullError, ClientDisconnected, the errors of the function.
    """
    work = state_of(request).work.prepare(caller_of(request), function, *args, **kwargs)
    return await until_disconnect(request.receive, work)


async def prepare(
    request: Request,
    body: _B,
    prepare_body: Callable[[ServerState, _B, Caller], Coroutine[Any, Any, _J]],
    *,
    num_prompts: int = 1,
    n: int,
) -> _J:
    """Check that the queue has room, then tokenise in a thread, then load the model if it is not.

    Raises: ApiError, RequestError, QueueFullError, ClientDisconnected; as `hold_model`.
    """
    state, record = state_of(request), record_of(request)
    state.admission.check_room(record, state.admission.num_at_once(num_prompts, n) * n)
    record.begin("tokenise")
    prepared = await until_disconnect(request.receive, prepare_body(state, body, caller_of(request)))
    await hold_model(request, getattr(body, "keep_alive", None))
    return prepared


def check_shared(param: str, num_characters: int, num_prompts: int) -> None:
    """Refuse a text that makes too much work as part of several prompts. Raises: ApiError 400 about `param`."""
    most = max(1, MAX_SHARED_CHARACTERS // max(1, num_characters))
    if num_prompts > most:
        message = f"{param} of {num_characters} characters is in {num_prompts} prompts: send at most {most} at once"
        raise ApiError(400, message, code="invalid_parameter", param=param)


async def check_grammars(state: ServerState, caller: Caller, requests: list[EngineRequest]) -> None:
    """Check the grammar that the requests of one body share, once the caller has its turn. Mutates: the list.

    Raises: InvalidParameterError, QueueFullError.
    """
    sampling, grammars = requests[0].sampling, state.engines.front_end.grammars
    if sampling is None or (form := sampling.structured_outputs) is None:
        return
    checked = grammars.found(form)
    if checked is None:
        checked = await state.work.check_grammar(caller, lambda: grammars.check(form))
    requests[:] = [msgspec.structs.replace(request, checked_grammar=checked) for request in requests]


async def answer(
    request: Request, requests: Sequence[EngineRequest], write: Callable[[list[RequestUpdate]], Any]
) -> Response:
    """Compute prepared requests, and answer with what `write` makes of their results. Raises: as `collect`."""
    state, record = state_of(request), record_of(request)

    async def work() -> Response:
        results = await collect(state, requests, record)
        sampling = requests[0].sampling
        has_logprobs = sampling is not None and (sampling.logprobs is not None or sampling.prompt_logprobs is not None)
        if has_logprobs or len(requests) > MANY_REQUESTS:
            # In a thread: a log-probability takes a microsecond, a prompt of 8,192 tokens has 172,000 of them, and
            # other streams would wait.
            return await state.work.write(record.client_id, lambda: JsonResponse(write(results)))
        return JsonResponse(write(results))

    return await until_disconnect(request.receive, work())


def prompt_usage(requests: Sequence[EngineRequest]) -> dict[str, int]:
    """Return OpenAI's `usage` of requests that generate nothing."""
    num_tokens = sum(request.num_prompt_tokens for request in requests)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def engine_ids(caller: Caller, num_prompts: int) -> list[str]:
    """Return the engine's ids for the prompts of one HTTP request: the request's own for a single one."""
    return [caller.engine_id] if num_prompts == 1 else [f"{caller.engine_id}-{index}" for index in range(num_prompts)]
