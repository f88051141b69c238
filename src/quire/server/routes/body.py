"""Reads the body of a request: its media type, then JSON, then the checks of its fields; and writes that of an answer.

FastAPI's own reading answers in another shape, and accepts what `protocol/json_text.py` refuses.
Next to read: `../protocol/validation.py`.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, Response

from quire.server.errors import ApiError, JsonResponse
from quire.server.front_end import FrontEnd
from quire.server.protocol.base import Body
from quire.server.protocol.validation import parse_body
from quire.server.state import ServerState

LARGE_BYTES = 64 << 10
"""Larger bodies are parsed in a thread: a megabyte takes some 20 ms, in which no other stream would get its tokens."""
_B = TypeVar("_B", bound=Body)


async def read_body(request: Request, kind: type[_B]) -> _B:
    """The checked request. Raises: ApiError 400 or 415."""
    media_type = request.headers.get("content-type", "")
    if media_type.partition(";")[0].strip().lower() != "application/json":
        given = json.dumps(media_type[:100]) if media_type else "none"
        raise ApiError(
            415, f"the body must be JSON, with Content-Type: application/json; it has {given}",
            code="unsupported_media_type",
        )  # fmt: skip
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise ApiError(
            415, f"Content-Encoding {json.dumps(encoding[:100])} is not supported: send the body as it is",
            code="unsupported_media_type",
        )  # fmt: skip
    data = await request.body()
    if len(data) > LARGE_BYTES:
        return await asyncio.to_thread(parse_body, kind, data)
    return parse_body(kind, data)


async def json_answer(front_end: FrontEnd, write: Callable[[], Any], *, is_large: bool) -> Response:
    """The answer that `write` makes. A large one is made in a thread: a log-probability takes the event loop a
    microsecond, a prompt of 8,192 tokens has 172,000 of them, and other streams would wait."""
    if is_large:
        return await front_end.run(lambda: JsonResponse(write()))
    return JsonResponse(write())


def check_model(state: ServerState, name: str | None) -> None:
    """Raises: ApiError 404 for a model that is not served; None is any."""
    if name is not None and name != state.model_name:
        message = f'the model "{name[:100]}" does not exist; this server has "{state.model_name}"'
        raise ApiError(404, message, code="model_not_found", param="model")
