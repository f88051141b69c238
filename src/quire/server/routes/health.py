"""Probes and the server's version.

`/health/live` and `/health/ready` need no API key, and say nothing that would deserve one.
Next to read: `../health.py`.
"""

from fastapi import APIRouter, Request, Response

from quire import __version__
from quire.server.errors import ApiError, JsonResponse
from quire.server.state import state_of

router = APIRouter()
RETRY_AFTER_S = 2


@router.get("/health/live")
async def live(request: Request) -> Response:
    """Whether the server makes progress, also while it starts and drains; else a platform should restart it."""
    health = state_of(request).health
    if health.is_stalled():
        message = f"requests are under way, but no step of the engine has ended for {health.stall_s():.0f} s"
        raise ApiError(503, message, code="engine_stalled")
    return JsonResponse({"status": "live"})


@router.get("/health/ready")
@router.get("/health")
@router.get("/ping")
async def ready(request: Request) -> Response:
    """Whether requests are taken."""
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
    """The server's version."""
    return JsonResponse({"version": __version__})
