"""The outermost layer: names each request, answers for what fails inside, and writes it down once it is over.

What is written: method, path without its query, status, duration, tokens, the key's name. Never content, never a key.
Next to read: `../logs.py`, `../metrics.py`.
"""

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.caller import ANONYMOUS, SCOPE_KEY
from quire.server.errors import ApiError
from quire.server.gate.authentication import bearer_token
from quire.server.gate.headers import OPEN_PATHS, header_value, with_headers
from quire.server.request_record import RequestRecord, set_current_record
from quire.server.state import ServerState

ACCESS_LOG = logging.getLogger("quire.access")
MAX_PATH_CHARACTERS = 200
CLIENT_LEFT = 499
"""The status that is noted where the client left before there was one."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class Access:
    """Request ids, the access log, the HTTP metrics and the last line against exceptions."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        self._state.metrics.watch_loop()
        record = new_record(scope)
        set_current_record(record)
        started = time.perf_counter()
        status = CLIENT_LEFT
        has_left = has_ended = False

        async def receive_watched() -> Message:
            nonlocal has_left
            message = await receive()
            has_left = has_left or message["type"] == "http.disconnect"
            return message

        async def send_named(message: Message) -> None:
            nonlocal status, has_ended
            if has_left and status == CLIENT_LEFT:
                return  # whatever is made of it, nobody reads it
            if message["type"] == "http.response.start":
                status = message["status"]
                message = with_headers(message, self._headers(scope, record))
            elif not message.get("more_body", False):
                has_ended = True
            await send(message)

        try:
            await self._app(scope, receive_watched, send_named)
        except Exception as error:
            if status == CLIENT_LEFT and not has_left:
                await ApiError.of(error).response()(scope, receive_watched, send_named)
            elif not (has_ended or has_left):
                # Half an answer is out: only a broken connection can say so.
                raise
        finally:
            self._note(scope, record, status, time.perf_counter() - started)

    def _headers(self, scope: Scope, record: RequestRecord) -> list[tuple[bytes, bytes]]:
        caller = scope.get(SCOPE_KEY, ANONYMOUS)
        limits = self._state.admission.rate_limit_headers(caller)
        return [(b"x-request-id", record.request_id.encode()), *limits]

    def _note(self, scope: Scope, record: RequestRecord, status: int, duration_s: float) -> None:
        route = getattr(scope.get("route"), "path", None)
        self._state.metrics.http_request(scope["method"], route, status, duration_s)
        # Probes come all day, and say nothing as long as all is well.
        level = logging.DEBUG if record.path in OPEN_PATHS and status < 400 else logging.INFO
        if ACCESS_LOG.isEnabledFor(level):
            fields: dict[str, object] = {
                "method": record.method,
                "path": record.path,
                "status": status,
                "ms": round(duration_s * 1000, 1),
                "prompt_tokens": record.num_prompt_tokens,
                "generated_tokens": record.num_generated_tokens,
                "key": record.client_id or "-",
                "request_id": record.request_id,
            }
            ACCESS_LOG.log(level, "request", extra={"fields": fields})


def new_record(scope: Scope) -> RequestRecord:
    """The record of a request that has just come. Its id is the client's, where that is short, plain and no key."""
    token = (bearer_token(scope) or b"").decode("latin-1")
    given = header_value(scope, b"x-request-id")
    request_id = f"req-{uuid.uuid4().hex}"
    if given is not None and _REQUEST_ID.fullmatch(given) and given.decode("ascii") != token:
        request_id = given.decode("ascii")
    path = scope["path"].replace(token, "[key]") if token else scope["path"]
    traces = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"] if name in _TRACE_HEADERS]
    return RequestRecord(request_id, scope["method"], path[:MAX_PATH_CHARACTERS], trace_headers=tuple(traces[:4]))
