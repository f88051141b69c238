"""Route of the live view: the engine's event lines as server-sent events.

Next to read: `../../engine/recorder.py` for the lines, `../streaming.py`.
"""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import ApiError, shown
from quire.server.models import models_of
from quire.server.request_record import record_of
from quire.server.routing import RouteTable
from quire.server.state import ServerState
from quire.server.streaming import EventStream, EventWriter

router = RouteTable()
MAX_OP_PERIOD = 1 << 20
_DIGITS = re.compile(r"[0-9]{1,20}")


@router.get("/xray/events")
async def events(request: Request) -> Response:
    """Stream event lines: a header, then an event of one or more lines at most 20 times a second.

    The query's `model` chooses a model, which is not loaded for it; `op_period` N times the instructions of every N-th
    step, `op_interval_ms` N those of a step each N ms at most. `engine` I: the I-th of several engines, else the first,
    0. Tokens and their text are sent if `--xray-text` allows it. Only requests of the same key have their ids.
    """
    period, interval_ms = (_number(request, name) for name in ("op_period", "op_interval_ms"))
    state = models_of(request).find(request.query_params.get("model"))
    if state.is_on_demand and state.engines.is_asleep:
        message = f'the model "{state.model_name}" is not loaded: its next request loads it'
        raise ApiError(503, message, code="model_not_loaded", retry_after_s=2)
    engine, num_engines = _number(request, "engine"), len(state.engines.supervisors)
    if engine >= num_engines:
        raise ApiError(400, f"engine={engine}: this server has {num_engines}, numbered from 0", param="engine")
    lines = _stream(state, engine, record_of(request).client_id, period, interval_ms / 1e3)
    return EventStream(lines, EventWriter().failed)


def _number(request: Request, name: str) -> int:
    """Return a number of the query, 0 without it. Raises: ApiError."""
    value = request.query_params.get(name, "0")
    # Python reads no integer of more than 4,300 digits.
    if not _DIGITS.fullmatch(value) or int(value) > MAX_OP_PERIOD:
        raise ApiError(400, f"{name}={shown(value)} is not a whole number in 0 … {MAX_OP_PERIOD}", param=name)
    return int(value)


async def _stream(
    state: ServerState, engine: int, client_id: str, op_period: int, op_interval_s: float
) -> AsyncGenerator[bytes, None]:
    watching = state.engines.supervisors[engine].client.watch(
        client_id, op_period=op_period, op_interval_s=op_interval_s, with_text=state.options.xray_text
    )
    async with aclosing(watching) as lines:
        async for data in lines:
            if state.is_draining:
                return
            # A comment keeps proxies from closing the connection.
            yield b"data: " + data.rstrip(b"\n").replace(b"\n", b"\ndata: ") + b"\n\n" if data else b":\n\n"
