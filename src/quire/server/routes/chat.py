"""`POST /v1/chat/completions`: from messages to tokens, and the whole answer; a streamed one is in `chat_stream.py`.

Next to read: `chat_stream.py`, `../generation.py`.
"""

from typing import Any

from fastapi import APIRouter, Request, Response

from quire.server.caller import Caller, caller_of
from quire.server.generation import Finished, collect, until_disconnect
from quire.server.logprobs import prompt_logprobs
from quire.server.protocol.answers import FINGERPRINT
from quire.server.protocol.chat import ChatRequest
from quire.server.routes.body import check_model, json_answer, read_body
from quire.server.routes.chat_job import ChatJob, prepare_chat
from quire.server.routes.chat_stream import ChatChunks
from quire.server.state import ServerState, state_of
from quire.server.streaming import EventStream, stream_updates
from quire.server.tools import read_message
from quire.server.usage import timings, usage

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatRequest)
    state, caller = state_of(request), caller_of(request)
    check_model(state, body.model)
    state.admission.check_room(caller, body.n or 1)
    front_end = state.supervisor.front_end
    job = await front_end.run(prepare_chat, front_end, body, caller)
    if body.stream:
        return EventStream(stream_updates(state, [job.request], caller, ChatChunks(state, job)))
    return await until_disconnect(request.receive, _answer(state, job, caller))


async def _answer(state: ServerState, job: ChatJob, caller: Caller) -> Response:
    (finished,) = await collect(state, [job.request], caller)
    is_large = bool(job.body.logprobs) or job.body.prompt_logprobs is not None
    return await json_answer(state.supervisor.front_end, lambda: _written(state, job, finished), is_large=is_large)


def _written(state: ServerState, job: ChatJob, finished: Finished) -> dict[str, Any]:
    writer = job.logprob_writer(state.supervisor.front_end)
    choices = []
    for choice in finished.choices:
        said, finish_reason = {"content": choice.text}, choice.finish_reason
        if job.tool_use is not None:
            said, finish_reason = read_message(job.tool_use, choice.text, choice.finish_reason)
        if job.opening:
            said["content"] = job.opening + (said["content"] or "")
        written: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "refusal": None, **said},
            "logprobs": None if writer is None else writer.chat(choice.logprobs or []),
            "finish_reason": finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if job.body.return_token_ids:
            written["token_ids"] = choice.token_ids
        choices.append(written)
    last, num_prompt = finished.last, job.request.num_prompt_tokens
    answer: dict[str, Any] = {
        "id": job.answer_id,
        "object": "chat.completion",
        "created": job.created,
        "model": state.model_name,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
        "usage": usage(num_prompt, finished.num_generated, last.num_cached_tokens, job.prompt.num_truncated),
    }
    times = timings(num_prompt, finished.num_generated, last)
    if times is not None:
        answer["timings"] = times
    if finished.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(finished.prompt_logprobs)
    if job.body.return_token_ids:
        answer["prompt_token_ids"] = job.request.prompt_token_ids
    return answer
