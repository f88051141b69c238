"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as in vLLM.

Adapters come and go while the server runs; requests name one as their `model`. Next to read: `engine/adapters.py`.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import ModelError
from quire.server.errors import ApiError, JsonResponse, shown
from quire.server.generation import unusable
from quire.server.models import models_of
from quire.server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.routes.exchange import read_body
from quire.server.routing import RouteTable
from quire.server.state import state_of

router = RouteTable()


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """Check an adapter's files and make its name known; the first request with it reads its matrices."""
    body = await read_body(request, LoadAdapterRequest)
    if body.lora_name in models_of(request).by_name:
        message = f"lora_name {shown(body.lora_name)} is the name of a model: choose another"
        raise ApiError(400, message, code="invalid_parameter", param="lora_name")
    front_end = state_of(request).engines.front_end
    try:
        await asyncio.to_thread(front_end.input_processor.adapters.load, body.lora_name, body.lora_path)
    except ModelError as error:
        raise unusable(body.lora_name, error.message, param="lora_path") from None
    return JsonResponse({"lora_name": body.lora_name, "status": "loaded"})


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Forget an adapter's name; requests that run with it go on."""
    body = await read_body(request, UnloadAdapterRequest)
    model, adapter = models_of(request).choose(body.lora_name)
    if adapter is None:
        message = f"{shown(body.lora_name)} is a model, not an adapter: name one that /v1/models lists with a parent"
        raise ApiError(400, message, code="invalid_parameter", param="lora_name")
    model.engines.front_end.input_processor.adapters.unload(adapter)
    return JsonResponse({"lora_name": body.lora_name, "status": "unloaded"})
