"""`POST /v1/embeddings`: one vector per input.

Next to read: `../generation.py`.
"""

import math
import sys
from array import array
from base64 import b64encode
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.sampling_params import PoolingParams
from quire.server.caller import Caller, caller_of
from quire.server.errors import ApiError
from quire.server.front_end import FrontEnd
from quire.server.generation import Finished, collect, new_id, until_disconnect
from quire.server.protocol.embedding import EmbeddingRequest
from quire.server.routes.body import check_model, json_answer, read_body
from quire.server.state import ServerState, state_of
from quire.types import Request as EngineRequest

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """Turn texts into vectors."""
    body = await read_body(request, EmbeddingRequest)
    state, caller = state_of(request), caller_of(request)
    check_model(state, body.model)
    state.admission.check_room(caller, len(body.inputs))
    front_end = state.supervisor.front_end
    requests = await front_end.run(_prepare, front_end, body, caller)
    return await until_disconnect(request.receive, _answer(state, body, requests, caller))


def _prepare(front_end: FrontEnd, body: EmbeddingRequest, caller: Caller) -> list[EngineRequest]:
    width = front_end.config.model.hidden_size
    if body.dimensions is not None and body.dimensions > width:
        message = f"dimensions must be at most {width}, the width of this model, got {body.dimensions}"
        raise ApiError(400, message, code="invalid_parameter", param="dimensions")
    params = PoolingParams(normalize=body.is_normalized)
    max_len = front_end.max_prompt_len(body.truncate_prompt_tokens, None)
    return [
        front_end.prepare(
            new_id("embd"),
            front_end.prompt(
                text,
                add_special_tokens=body.add_special_tokens is not False,
                max_len=max_len,
                keeps_start=body.truncation_side != "left",
            ),
            params,
            **caller.identity(body.priority),
        )
        for text in body.inputs
    ]


async def _answer(
    state: ServerState, body: EmbeddingRequest, requests: list[EngineRequest], caller: Caller
) -> Response:
    results = await collect(state, requests, caller)
    front_end = state.supervisor.front_end
    return await json_answer(front_end, lambda: _written(state, body, requests, results), is_large=len(results) > 8)


def _written(
    state: ServerState, body: EmbeddingRequest, requests: list[EngineRequest], results: list[Finished]
) -> dict[str, Any]:
    write = base64_of if body.encoding_format == "base64" else list
    num_tokens = sum(request.num_prompt_tokens for request in requests)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": write(_shortened(body, finished.last.embedding or []))}
            for index, finished in enumerate(results)
        ],
        "model": state.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _shortened(body: EmbeddingRequest, vector: list[float]) -> list[float]:
    if body.dimensions is None or body.dimensions >= len(vector):
        return vector
    kept = vector[: body.dimensions]
    length = math.hypot(*kept) if body.is_normalized else 1.0
    return [value / length for value in kept] if length else kept


def base64_of(vector: list[float]) -> str:
    """OpenAI's compact form: base64 of little-endian fp32."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return b64encode(values.tobytes()).decode()
