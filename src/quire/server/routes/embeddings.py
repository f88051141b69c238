"""`POST /v1/embeddings`: one vector per input.

Next to read: `exchange.py`, `../generation.py`.
"""

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.process.messages import RequestUpdate
from quire.server.errors import ApiError
from quire.server.protocol.fields import prompt_list
from quire.server.protocol.prompts import EmbeddingRequest
from quire.server.request_record import Caller
from quire.server.routes.exchange import answer, engine_ids, prepare, prompt_usage, read_body, served_name
from quire.server.routing import RouteTable
from quire.server.state import ServerState
from quire.types import RequestSpec as EngineRequest

router = RouteTable()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """Turn texts into vectors."""
    body = await read_body(request, EmbeddingRequest)
    requests = await prepare(request, body, _prepare, num_prompts=len(prompt_list(body.input)), n=1)
    name = served_name(request)
    return await answer(request, requests, lambda results: _written(name, body, requests, results))


async def _prepare(state: ServerState, body: EmbeddingRequest, caller: Caller) -> list[EngineRequest]:
    return await state.work.prepare(caller, _requests, state, body, caller)


def _requests(state: ServerState, body: EmbeddingRequest, caller: Caller) -> list[EngineRequest]:
    front_end = state.engines.front_end
    width = front_end.config.model.hidden_size
    if body.dimensions is not None and body.dimensions > width:
        message = f"dimensions must be at most {width}, the width of this model, got {body.dimensions}"
        raise ApiError(400, message, code="invalid_parameter", param="dimensions")
    default = front_end.input_processor.default_pooling_params
    params = replace(default, normalize=default.normalize and body.is_normalized)
    max_len = front_end.max_prompt_len(body.truncate_prompt_tokens, None)
    adds_special_tokens, keeps_start = body.add_special_tokens is not False, body.truncation_side != "left"
    identity = caller.identity(body.priority)
    requests = []
    texts: Sequence[str | list[int]] = prompt_list(body.input)
    names = engine_ids(caller, len(texts))
    for index, text in enumerate(texts):
        prompt = front_end.prompt(
            text, add_special_tokens=adds_special_tokens, max_len=max_len, keeps_start=keeps_start
        )
        requests.append(front_end.prepare(names[index], prompt, params, **identity))
    return requests


def _written(
    model: str, body: EmbeddingRequest, requests: list[EngineRequest], results: list[RequestUpdate]
) -> dict[str, Any]:
    write = base64_of if body.encoding_format == "base64" else list
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": write(_shortened(body, update.embedding or []))}
            for index, update in enumerate(results)
        ],
        "model": model,
        "usage": prompt_usage(requests),
    }


def _shortened(body: EmbeddingRequest, vector: list[float]) -> list[float]:
    if body.dimensions is None or body.dimensions >= len(vector):
        return vector
    kept = vector[: body.dimensions]
    length = math.hypot(*kept) if body.is_normalized else 1.0
    return [value / length for value in kept] if length else kept


def base64_of(vector: list[float]) -> str:
    """Return OpenAI's compact encoding: base64 of little-endian fp32."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return b64encode(values.tobytes()).decode()
