"""`GET /openapi.json`: the description of the API."""

import functools

import msgspec
from fastapi import APIRouter, Response

from quire.server.openapi import build_document

router = APIRouter()


@router.get("/openapi.json")
async def openapi() -> Response:
    """The description of the API."""
    return Response(_document(), media_type="application/json")


@functools.cache
def _document() -> bytes:
    return msgspec.json.encode(build_document())
