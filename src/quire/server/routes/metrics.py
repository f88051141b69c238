"""`GET /metrics`, for Prometheus. It needs an API key like everything else. Next to read: `../metrics.py`."""

from fastapi import APIRouter, Request, Response

from quire.server.metrics import CONTENT_TYPE
from quire.server.state import state_of

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics, in Prometheus's text format."""
    return Response(state_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})
