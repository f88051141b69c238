"""Route of the live view: the engine's event lines as server-sent events.

Next to read: `../../engine/recorder.py` for the lines, `../streaming.py`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from quire.server.errors import ApiError
from quire.server.models import models_of
from quire.server.state import ServerState
from quire.server.streaming import EventStream, EventWriter

router = APIRouter()
MAX_OP_PERIOD = 1 << 20


@router.get("/xray/events")
async def events(request: Request) -> Response:
    """Stream event lines: a header, then an event of one or more lines at most 20 times a second.

    The query's `model` chooses a model, which is not loaded for it; `op_period` N times the instructions of every N-th
    step. Text is sent if `--xray-text` allows it.
    """
    value = request.query_params.get("op_period", "0")
    if not value.isascii() or not value.isdigit() or int(value) > MAX_OP_PERIOD:
        raise ApiError(400, f"op_period={value!r} is not a whole number in 0 … {MAX_OP_PERIOD}", param="op_period")
    state = models_of(request).find(request.query_params.get("model"))
    if state.is_on_demand and state.supervisor.is_asleep:
        message = f'the model "{state.model_name}" is not loaded: its next request loads it'
        raise ApiError(503, message, code="model_not_loaded", retry_after_s=2)
    return EventStream(_stream(state, int(value)), EventWriter().failed)


async def _stream(state: ServerState, op_period: int) -> AsyncGenerator[bytes, None]:
    watching = state.supervisor.client.watch(op_period=op_period, with_text=state.options.xray_text)
    async with aclosing(watching) as lines:
        async for data in lines:
            if state.is_draining:
                return
            # A comment keeps proxies from closing the connection.
            yield b"data: " + data.rstrip(b"\n").replace(b"\n", b"\ndata: ") + b"\n\n" if data else b":\n\n"
