"""Probes and the server's version."""

from fastapi import APIRouter, Request, Response

from quire import __version__
from quire.server.errors import ApiError, JsonResponse
from quire.server.state import state_of

router = APIRouter()


@router.get("/health/live")
async def live() -> Response:
    """Whether the server makes progress; a platform should restart it otherwise."""
    return JsonResponse({"status": "live"})


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """Whether requests are taken."""
    supervisor = state_of(request).supervisor
    if not supervisor.is_ready:
        raise ApiError(503, f"the engine is {supervisor.state.value}", code="engine_not_ready", retry_after_s=2)
    return JsonResponse({"status": "ready"})


@router.get("/version")
async def version() -> Response:
    """The server's version."""
    return JsonResponse({"version": __version__})
