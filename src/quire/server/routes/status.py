"""Routes about the server itself: probes, version, metrics, models, description of the API.

Next to read: `../health.py`, `../metrics.py`, `../openapi.py`.
"""

import functools
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from quire import __version__
from quire.server.errors import ApiError, JsonResponse
from quire.server.generation import timestamp
from quire.server.metrics import CONTENT_TYPE
from quire.server.openapi import build_document
from quire.server.routes.exchange import check_model
from quire.server.state import ServerState, state_of

router = APIRouter()
PROBE_METHODS = ["GET", "HEAD"]
RETRY_AFTER_S = 2
STARTED = timestamp()


@router.api_route("/health/live", methods=PROBE_METHODS)
async def live(request: Request) -> Response:
    """Answer 200 while the server makes progress, also while it starts or drains. A platform restarts it otherwise."""
    health = state_of(request).health
    if health.is_stalled():
        message = f"requests are under way, but no step of the engine has ended for {health.stall_s():.0f} s"
        raise ApiError(503, message, code="engine_stalled")
    return JsonResponse({"status": "live"})


@router.api_route("/health/ready", methods=PROBE_METHODS)
@router.api_route("/health", methods=PROBE_METHODS)
@router.api_route("/ping", methods=PROBE_METHODS)
async def ready(request: Request) -> Response:
    """Answer 200 while the server takes requests."""
    state = state_of(request)
    if state.is_draining:
        raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=RETRY_AFTER_S)
    if not state.supervisor.is_ready:
        message = f"the engine is {state.supervisor.state.value}"
        raise ApiError(503, message, code="engine_not_ready", retry_after_s=RETRY_AFTER_S)
    if not state.health.answers():
        message = f"the engine has not answered for {state.health.silence_s():.0f} s"
        raise ApiError(503, message, code="engine_not_answering", retry_after_s=RETRY_AFTER_S)
    return JsonResponse({"status": "ready"})


@router.get("/version")
async def version() -> Response:
    """Return the server's version."""
    return JsonResponse({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus's text format."""
    return Response(state_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Return a list of the one model of this server."""
    return JsonResponse({"object": "list", "data": [_card(state_of(request))]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request) -> Response:
    """Return one model."""
    state = state_of(request)
    check_model(state, request.path_params["model_id"])
    return JsonResponse(_card(state))


@router.get("/openapi.json")
async def openapi() -> Response:
    """Return the description of the API."""
    return Response(_document(), media_type="application/json")


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


@functools.cache
def _document() -> bytes:
    return msgspec.json.encode(build_document())
