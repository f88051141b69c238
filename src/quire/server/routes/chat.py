"""`POST /v1/chat/completions`.

Next to read: `../generation.py`, `../streaming.py`.
"""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.engine.process.messages import ChoiceUpdate, RequestUpdate
from quire.server.caller import Caller, caller_of
from quire.server.errors import ApiError, JsonResponse
from quire.server.front_end import FrontEnd
from quire.server.generation import generate, new_id, timestamp, until_disconnect
from quire.server.protocol.chat import ChatRequest
from quire.server.state import ServerState, state_of
from quire.server.streaming import DONE, EventStream, event
from quire.types import Request as EngineRequest

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    caller = caller_of(request)
    check_model(state, body.model)
    state.admission.check_room(caller, body.n)
    front_end = state.supervisor.front_end
    prepared = await front_end.run(_prepare, front_end, body, caller)
    if body.stream:
        return EventStream(_stream(state, body, prepared, caller))
    return JsonResponse(await until_disconnect(request.receive, _collect(state, prepared, caller)))


def check_model(state: ServerState, name: str) -> None:
    """Raises: ApiError 404 for a model that is not served."""
    if name != state.model_name:
        message = f"the model {name[:100]!r} does not exist; this server has {state.model_name!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


def _prepare(front_end: FrontEnd, body: ChatRequest, caller: Caller) -> EngineRequest:
    chosen = body.sampling_values()
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None:
        chosen["max_tokens"] = max_tokens
    if body.logprobs:
        chosen["logprobs"] = body.top_logprobs or 0
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    prompt = front_end.render_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    return front_end.prepare(
        body.request_id or new_id("chatcmpl"),
        prompt,
        front_end.sampling_params(chosen),
        priority=body.priority,
        client_id=caller.client_id,
        cache_salt=caller.cache_salt + (body.cache_salt or ""),
    )


async def _collect(state: ServerState, prepared: EngineRequest, caller: Caller) -> dict[str, Any]:
    created = timestamp()
    choices: dict[int, ChoiceUpdate] = {}
    last: RequestUpdate | None = None
    async for update in generate(state, prepared, caller, streams=False):
        last = update
        choices |= {choice.index: choice for choice in update.choices}
    assert last is not None
    num_generated = sum(len(choice.token_ids) for choice in choices.values())
    return {
        "id": prepared.request_id,
        "object": "chat.completion",
        "created": created,
        "model": state.model_name,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in sorted(choices.items())
        ],
        "usage": usage(prepared, num_generated, last.num_cached_tokens),
    }


async def _stream(
    state: ServerState, body: ChatRequest, prepared: EngineRequest, caller: Caller
) -> AsyncIterator[bytes]:
    head = {
        "id": prepared.request_id,
        "object": "chat.completion.chunk",
        "created": timestamp(),
        "model": state.model_name,
    }
    num_generated = num_cached = 0
    for_all = b"".join(_chunk(head, index, {"role": "assistant", "content": ""}) for index in range(body.n))
    async for update in generate(state, prepared, caller, streams=True):
        num_cached = update.num_cached_tokens
        data, for_all = for_all, b""
        for choice in update.choices:
            num_generated += len(choice.token_ids)
            if choice.text:
                data += _chunk(head, choice.index, {"content": choice.text})
            if choice.finish_reason is not None:
                data += _chunk(head, choice.index, {}, choice.finish_reason)
        if data:
            yield data
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": usage(prepared, num_generated, num_cached)})
    yield DONE


def _chunk(head: dict[str, Any], index: int, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return event({**head, "choices": [choice]})


def usage(prepared: EngineRequest, num_generated: int, num_cached: int) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": prepared.num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": prepared.num_prompt_tokens + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
