"""The outermost layer: names each request, answers for what fails inside, and writes it down once it is over.

What is written: method, path without its query, status, duration, tokens, the key's name. Never content, never a key.
Next to read: `../logs.py`, `../metrics.py`.
"""

import asyncio
import logging
import os
import re
import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.caller import SCOPE_KEY
from quire.server.errors import ApiError
from quire.server.gate.authentication import bearer_token
from quire.server.gate.headers import OPEN_PATHS, header_value, with_headers
from quire.server.request_record import CLIENT_LEFT, RECORD_KEY, RequestRecord, set_current_record
from quire.server.state import ServerState

ACCESS_LOG = logging.getLogger("quire.access")
MAX_PATH_CHARACTERS = 200
REPEATS_S = 1.0
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class Repeats:
    """Of the requests of one key that are sent away within a second, the first has a line; then comes their number.

    Under a flood the lines would cost more than the answers, and hide all others.
    """

    def __init__(self) -> None:
        self._num_more: Counter[str] = Counter()

    def count(self, client_id: str) -> bool:
        """Whether this one is counted, and needs no line of its own."""
        is_first = client_id not in self._num_more
        self._num_more[client_id] += not is_first
        if is_first:
            asyncio.get_running_loop().call_later(REPEATS_S, self._write, client_id)
        return not is_first

    def _write(self, client_id: str) -> None:
        num_more = self._num_more.pop(client_id)
        if num_more:
            fields = {"status": 429, "requests": num_more, "key": client_id or "-"}
            ACCESS_LOG.info("more requests", extra={"fields": fields})


class Access:
    """Request ids, the access log, the HTTP metrics and the last line against exceptions."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._repeats = Repeats()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        record = self.begin(scope)
        set_current_record(record)
        has_left = has_ended = False

        async def receive_watched() -> Message:
            nonlocal has_left
            message = await receive()
            has_left = has_left or message["type"] == "http.disconnect"
            return message

        async def send_named(message: Message) -> None:
            nonlocal has_ended
            if has_left and record.status == CLIENT_LEFT:
                return  # whatever is made of it, nobody reads it
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = with_headers(message, self.headers(scope))
            elif not message.get("more_body", False):
                has_ended = True
            await send(message)

        try:
            await self._app(scope, receive_watched, send_named)
        except Exception as error:
            if record.status == CLIENT_LEFT and not has_left:
                await ApiError.of(error).response()(scope, receive_watched, send_named)
            elif not (has_ended or has_left):
                # Half an answer is out: only a broken connection can say so.
                raise
        finally:
            self.note(scope)

    def begin(self, scope: Scope) -> RequestRecord:
        """The record of a request, which is made once. Mutates: `scope`."""
        record: RequestRecord | None = scope.get(RECORD_KEY)
        if record is None:
            self._state.metrics.watch_loop()
            record = scope[RECORD_KEY] = new_record(scope)
        return record

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """What every answer has; a stranger, whom the gate has not named, has no limits to be told of."""
        caller = scope.get(SCOPE_KEY)
        limits = [] if caller is None else self._state.admission.rate_limit_headers(caller)
        return [(b"x-request-id", scope[RECORD_KEY].request_id.encode()), *limits]

    def note(self, scope: Scope) -> None:
        """A request is over: count it, and write its line. Once, however often it is called."""
        record: RequestRecord = scope[RECORD_KEY]
        if record.is_noted:
            return
        record.is_noted = True
        status, duration_s = record.status, time.perf_counter() - record.started_s
        route = getattr(scope.get("route"), "path", None)
        self._state.metrics.http_request(scope["method"], route, status, duration_s)
        # Probes come all day, and say nothing as long as all is well.
        level = logging.DEBUG if record.path in OPEN_PATHS and status < 400 else logging.INFO
        if ACCESS_LOG.isEnabledFor(level) and not (status == 429 and self._repeats.count(record.client_id)):
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
    request_id = f"req-{os.urandom(16).hex()}"
    if given is not None and _REQUEST_ID.fullmatch(given) and given.decode("ascii") != token:
        request_id = given.decode("ascii")
    path = scope["path"].replace(token, "[key]") if token else scope["path"]
    traces = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"] if name in _TRACE_HEADERS]
    return RequestRecord(request_id, scope["method"], path[:MAX_PATH_CHARACTERS], trace_headers=tuple(traces[:4]))
