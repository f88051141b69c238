"""The page at the server's root, and what it needs beside the API: predictions and comparisons.

The files are open to everyone, since a browser loads them before it has a key; they contain nothing of the server.
`/xray/explain`, `/xray/ranks` and `/lab/compare` run the `quire` command in a process of its own, so that they never
touch the engine that serves. Next to read: `../../page/app.js`, `xray.py`.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from quire.insight.trace import page_template
from quire.server.errors import ApiError, JsonResponse, not_admin
from quire.server.generation import until_disconnect
from quire.server.keys import VARIABLE as KEY_VARIABLE
from quire.server.models import models_of
from quire.server.protocol.fields import Body
from quire.server.request_record import record_of
from quire.server.routes.exchange import read_body
from quire.server.routing import RouteTable
from quire.server.state import state_of

router = RouteTable()
FILES = StaticFiles(packages=[("quire", "page")])
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
MAX_CHILD_S = 900.0
NICENESS = 10
"""The server's requests come before a comparison."""
MAX_MESSAGE_CHARACTERS = 500
_child_lock = asyncio.Lock()


class ComparisonSettings(Body):
    """Options of `quire compare` that a client may set. `model`: the model of this server; `pool`: bytes."""

    model: Literal["served"] | None = None
    seed: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    requests: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    slots: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    context: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    rank: Annotated[int, Field(ge=1, le=256)] | None = None
    rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    pool: Annotated[int, Field(gt=0, le=1 << 36)] | None = None


class ComparisonRequest(Body):
    """A comparison by its name in `quire compare`, with its settings."""

    name: Literal["cache", "batching", "kv", "speculation", "adapters", "attention"]
    settings: ComparisonSettings = Field(default_factory=ComparisonSettings)


# --- Files ------------------------------------------------------------------------------------


@router.route("/", ["GET", "HEAD"])
async def index(request: Request) -> Response:
    """Return the page."""
    return await _file("index.html", request)


@router.route("/page/trace.html", ["GET", "HEAD"])
async def saved_trace(request: Request) -> Response:
    """Return a saved trace without its lines."""
    return Response(page_template(), media_type="text/html", headers=HEADERS)


@router.route("/page/{name:path}", ["GET", "HEAD"])
async def file(request: Request) -> Response:
    """Return a file of the page."""
    return await _file(request.path_params["name"], request)


async def _file(name: str, request: Request) -> Response:
    response = await FILES.get_response(name, request.scope)
    response.headers.update(HEADERS)
    return response


# --- Commands ---------------------------------------------------------------------------------


@router.get("/xray/explain")
async def explain(request: Request) -> Response:
    """Return what `quire explain --json` prints for a served model. The query's `again` measures the machine again.

    That changes what all clients get. The header `x-measured-at` says when, in seconds of the Unix epoch.
    """
    model = models_of(request).find(request.query_params.get("model")).engines.options.model
    again = "again" in request.query_params
    if again and not record_of(request).is_admin:
        raise not_admin("measuring again")
    return await _once(request, "explain", model, again=again)


@router.get("/xray/ranks")
async def ranks(request: Request) -> Response:
    """Return what `quire view ranks --json` prints for a served model. Raises: ApiError for a model on one rank."""
    options = models_of(request).find(request.query_params.get("model")).engines.options
    if options.tensor_parallel_size == 1:
        raise ApiError(404, "this model runs on one rank: --tensor-parallel-size cuts it", code="single_rank")
    return await _once(request, "view", "ranks", options.model, "--tp", str(options.tensor_parallel_size))


@router.post("/lab/compare")
async def compare(request: Request) -> Response:
    """Return what `quire compare NAME --json` prints."""
    body = await read_body(request, ComparisonRequest)
    values = body.settings.model_dump(exclude_none=True)
    if "model" in values:
        values["model"] = state_of(request).engines.options.model
    settings = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return JsonResponse(await _run(request, ["compare", body.name, "--json", "--quiet", *settings]))


async def _once(request: Request, *command: str, again: bool = False) -> Response:
    """Return the JSON that a `quire` command prints; the same one again if it ran before. `again`: run it anew."""
    cached: dict[tuple[str, ...], tuple[Any, float]] = request.app.state.__dict__.setdefault("printed", {})
    if again or command not in cached:
        cached[command] = (await _run(request, [*command, "--json", "--quiet"]), time.time())
    printed, at_s = cached[command]
    answer = JsonResponse(printed)
    answer.headers["x-measured-at"] = f"{at_s:.0f}"
    return answer


async def _run(request: Request, arguments: list[str]) -> dict[str, Any]:
    """Return the JSON that a `quire` command prints; it is killed when the client leaves. Raises: ApiError."""
    if _child_lock.locked():
        raise ApiError(429, "another comparison runs: try again when it has ended", code="lab_busy", retry_after_s=5)
    async with _child_lock:
        return await until_disconnect(request.receive, _output_of(arguments))


async def _output_of(arguments: list[str]) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "quire",
        *arguments,
        env=environment,
        start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")  # killed first where memory runs out
        output, errors = await asyncio.wait_for(process.communicate(), MAX_CHILD_S)
    except TimeoutError:
        raise ApiError(504, f"`quire {arguments[0]}` took longer than {MAX_CHILD_S:.0f} s", code="timeout") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode == 0:
        with contextlib.suppress(ValueError):
            answer: dict[str, Any] = json.loads(output)
            return answer
    reason = errors.decode(errors="replace").strip()[-MAX_MESSAGE_CHARACTERS:] or f"exit code {process.returncode}"
    raise ApiError(501, f"`quire {' '.join(arguments[:2])}` failed: {reason}", code="command_failed")
