"""`GET /v1/models` and `GET /v1/models/{id}`."""

from typing import Any

from fastapi import APIRouter, Request, Response

from quire.server.errors import JsonResponse
from quire.server.generation import timestamp
from quire.server.routes.exchange import check_model
from quire.server.state import ServerState, state_of

router = APIRouter()
STARTED = timestamp()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The model of this server."""
    return JsonResponse({"object": "list", "data": [_card(state_of(request))]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request) -> Response:
    """One model."""
    state = state_of(request)
    check_model(state, request.path_params["model_id"])
    return JsonResponse(_card(state))


def _card(state: ServerState) -> dict[str, Any]:
    config = state.supervisor.front_end.config
    return {
        "id": state.model_name,
        "object": "model",
        "created": STARTED,
        "owned_by": "quire",
        "root": state.model_name,
        "parent": None,
        "max_model_len": config.scheduler.max_model_len,
    }
