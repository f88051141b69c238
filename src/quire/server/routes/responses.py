"""`POST /v1/responses`: text or calls of functions in answer to a text or a conversation.

Nothing is stored, so there is no route to read a response again. A streamed answer is in `response_stream.py`.
Next to read: `response_job.py`, `../generation.py`.
"""

from typing import Any

from fastapi import APIRouter, Request, Response

from quire.server.caller import Caller, caller_of
from quire.server.generation import Finished, collect, until_disconnect
from quire.server.protocol.responses import ResponsesRequest
from quire.server.routes.body import check_model, json_answer, read_body
from quire.server.routes.response_job import ResponseJob, prepare_response
from quire.server.routes.response_output import ResponseOutput
from quire.server.routes.response_stream import ResponseEvents, response_status
from quire.server.state import ServerState, state_of
from quire.server.streaming import EventStream, stream_updates

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a text or a conversation."""
    body = await read_body(request, ResponsesRequest)
    state, caller = state_of(request), caller_of(request)
    check_model(state, body.model)
    state.admission.check_room(caller, 1)
    front_end = state.supervisor.front_end
    job = await front_end.run(prepare_response, front_end, body, caller, state.model_name)
    if body.stream:
        events = ResponseEvents(job)
        return EventStream(stream_updates(state, [job.request], caller, events), events.failed)
    return await until_disconnect(request.receive, _answer(state, job, caller))


async def _answer(state: ServerState, job: ResponseJob, caller: Caller) -> Response:
    (finished,) = await collect(state, [job.request], caller)
    front_end = state.supervisor.front_end
    return await json_answer(front_end, lambda: _written(job, finished), is_large=job.writer is not None)


def _written(job: ResponseJob, finished: Finished) -> dict[str, Any]:
    (choice,) = finished.choices
    output = ResponseOutput(job)
    output.begin()
    output.write(choice)
    usage = job.usage(finished.num_generated, finished.last.num_cached_tokens)
    return job.response(response_status(choice.finish_reason or "stop"), output=output.items, usage=usage)
