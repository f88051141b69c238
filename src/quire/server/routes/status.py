"""Routes about the server itself: probes, version, metrics, models, description of the API.

Next to read: `../supervisor.py`, `../metrics.py`, `../openapi.py`.
"""

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.server import supervisor
from quire.server.errors import ApiError, JsonResponse
from quire.server.generation import timestamp
from quire.server.metrics import CONTENT_TYPE
from quire.server.models import models_of
from quire.server.openapi import build_document
from quire.server.routing import RouteTable
from quire.server.state import ServerState, state_of

router = RouteTable()
PROBE_METHODS = ["GET", "HEAD"]
RETRY_AFTER_S = 2
STARTED = timestamp()


@router.route("/health/live", PROBE_METHODS)
async def live(request: Request) -> Response:
    """Answer 200 while the server makes progress, also while it starts or drains. A platform restarts it otherwise."""
    stall_s = max(model.engines.stall_s() for model in models_of(request).by_name.values())
    if stall_s >= supervisor.MAX_STALL_S:
        message = f"requests are under way, but no step of the engine has ended for {stall_s:.0f} s"
        raise ApiError(503, message, code="engine_stalled")
    return JsonResponse({"status": "live"})


@router.route("/health/ready", PROBE_METHODS)
@router.route("/health", PROBE_METHODS)
@router.route("/ping", PROBE_METHODS)
async def ready(request: Request) -> Response:
    """Answer 200 while the server takes requests; with `?model=NAME` while that model is loaded and answers."""
    state, models = state_of(request), models_of(request)
    if state.is_draining:
        raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=RETRY_AFTER_S)
    name = request.query_params.get("model")
    if models.is_on_demand and name is None:
        return JsonResponse({"status": "ready"})
    state = models.find(name)
    if state.is_asleep:
        raise supervisor.asleep()
    if not state.engines.is_ready:
        message = f"the engine is {state.engines.state.value}"
        raise ApiError(503, message, code="engine_not_ready", retry_after_s=RETRY_AFTER_S)
    if (silence_s := state.engines.silence_s()) >= supervisor.MAX_SILENT_S:
        message = f"the engine has sent nothing for {silence_s:.0f} s"
        raise ApiError(503, message, code="engine_not_answering", retry_after_s=RETRY_AFTER_S)
    return JsonResponse({"status": "ready"})


@router.get("/version")
async def version(request: Request) -> Response:
    """Return the server's version."""
    return JsonResponse({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus's text format."""
    return Response(state_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Return a list of the models of this server."""
    models = models_of(request).by_name.values()
    cards = [_card(model, name) for model in models for name in (None, *model.adapter_names)]
    return JsonResponse({"object": "list", "data": cards})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request) -> Response:
    """Return one model."""
    return JsonResponse(_card(*models_of(request).choose(request.path_params["model_id"])))


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Return the description of the API."""
    return Response(_document(), media_type="application/json")


def _card(model: ServerState, adapter: str | None = None) -> dict[str, Any]:
    engines = model.engines
    front_end = engines.front_end if engines.has_front_end or not model.is_on_demand else None
    return {
        "id": adapter or model.model_name,
        "object": "model",
        "created": STARTED,
        "owned_by": "quire",
        "root": adapter or model.model_name,
        "parent": model.model_name if adapter else None,
        "max_model_len": front_end and front_end.config.scheduler.max_model_len,
        "has_chat_template": front_end and front_end.dialogue.has_template,
        "vocabulary": front_end and front_end.tokenizer.identity,
        "status": {"value": model.status},
    }


@functools.cache
def _document() -> bytes:
    return msgspec.json.encode(build_document())
