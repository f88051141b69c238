"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping`: free a model's memory and load it again, as in vLLM.

Both end with an answer once it is done. Next to read: `../models.py`.
"""

from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import ApiError, JsonResponse, shown
from quire.server.models import models_of
from quire.server.routing import RouteTable
from quire.server.state import ServerState

router = RouteTable()


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Let running requests finish, refuse new ones, and free weights and KV cache.

    Both of vLLM's levels do so: the files of the model are where its weights come from again.
    """
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise ApiError(400, f"level must be 1 or 2, got {shown(level)}", code="invalid_parameter", param="level")
    for model in _chosen(request):
        await models_of(request).sleep(model, model.options.drain_timeout_s)
    return JsonResponse({"is_sleeping": True})


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Load the model again."""
    if request.query_params.get("tags"):
        message = "weights and KV cache are loaded together: leave tags out"
        raise ApiError(400, message, code="invalid_parameter", param="tags")
    chosen = _chosen(request)
    if len(chosen) > 1:
        names = ", ".join(model.model_name for model in chosen)
        raise ApiError(400, f"name the model to load, as ?model=NAME: {names}", code="invalid_parameter", param="model")
    await models_of(request).wake_up(chosen[0])
    return JsonResponse({"is_sleeping": False})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Return whether the model, or all of them, are asleep."""
    return JsonResponse({"is_sleeping": all(model.engines.is_asleep for model in _chosen(request))})


def _chosen(request: Request) -> list[ServerState]:
    """Return the model of the query, else all. Raises: ApiError 404."""
    name = request.query_params.get("model")
    models = models_of(request)
    return [models.find(name)] if name else list(models.by_name.values())
