"""ASGI layer between the HTTP server and the application: request ids, access log, API keys, known hosts, CORS, limits.

It reads the raw scope and refuses by default, so no route has to ask for protection. Below it is `connection.py`,
behind it `admission.py`. Next to read: `keys.py`, `request_record.py`.
"""

import asyncio
import ipaddress
import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.bodies import SMALL_BYTES, BodyMemory, Room
from quire.server.errors import MESSAGES_PATH, ApiError, is_messages_path, not_admin
from quire.server.keys import ADMIN, KeyRing, check_exposure
from quire.server.request_record import (
    ANONYMOUS,
    CLIENT_LEFT,
    LEASES_KEY,
    RECORD_KEY,
    Caller,
    RequestRecord,
    new_request_id,
)
from quire.server.sending import Sending
from quire.server.state import STATE_KEY
from quire.server.supervisor import asleep

if TYPE_CHECKING:
    from quire.server.state import ServerState

ACCESS_LOG = logging.getLogger("quire.access")
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
"""Probes, which need no API key."""
OPEN_WHILE_DRAINING = OPEN_PATHS | {"/metrics", "/version"}
SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
QUEUED_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/infill",
        "/v1/responses",
        MESSAGES_PATH,
        "/v1/embeddings",
        "/classify",
    }
    | {*SCORE_PATHS, *RERANK_PATHS}
)
"""Routes whose requests take a place in the queue."""
ADMIN_PATHS = frozenset({"/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes that change what other clients get."""
CORS_EXPOSED = ("x-request-id", "request-id", "retry-after")
MAX_TOKEN_BYTES = 1024
MAX_PATH_CHARACTERS = 200
REPEATS_S = 1.0
"""Only the first 429 of a key within this time gets a log line; the others are logged as one number."""
NO_KEY = "this server needs an API key, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`"
UNKNOWN_KEY = "this API key is not known here: check it, or ask for one of this server"
"""Contains no part of the key."""
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class Gate:
    """The application with its protection, as one ASGI application."""

    def __init__(self, app: ASGIApp, state: "ServerState", keys: KeyRing | None = None) -> None:
        """`keys` None: those of the options and the environment.

        Raises: ConfigError for unreadable keys, and for a public address without a key.
        """
        options = state.options
        self._app = app
        self._state = state
        self._keys = KeyRing.load(options, os.environ) if keys is None else keys
        check_exposure(options, self._keys)
        self._hosts: frozenset[str] | None = None  # None: any name, on a public address without --allowed-hosts
        if options.is_local or options.allowed_hosts:
            self._hosts = frozenset(name.lower() for name in (options.host, "localhost", *options.allowed_hosts))
        self._origins = frozenset(origin.lower() for origin in options.allowed_origins)
        self._cors = CORSMiddleware(
            self._checked, self._origins, ("*",), ("*",), allow_private_network=True, expose_headers=CORS_EXPOSED
        )
        self._num_repeats: dict[str, int] = {}
        self._bodies, self._sending = BodyMemory(options.max_body_bytes), Sending()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A WebSocket is closed: no route has one."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        record = self._record(scope)
        has_left = has_ended = False

        async def receive_watched() -> Message:
            nonlocal has_left
            message = await receive()
            has_left = has_left or message["type"] == "http.disconnect"
            return message

        async def send_named(message: Message) -> None:
            nonlocal has_ended
            if has_left and record.status == CLIENT_LEFT:
                return
            if message["type"] == "http.response.start":
                record.status = message["status"]
                # Anthropic's clients read the second name.
                names = [b"x-request-id", *([b"request-id"] if is_messages_path(scope["path"]) else [])]
                given = [(name, record.request_id.encode()) for name in names]
                message["headers"] = [*message.get("headers", ()), *given]
            elif not message.get("more_body", False):
                has_ended = True
                record.ended_s = time.perf_counter()
            await self._sending.send(send, message)

        origin = header_value(scope, b"origin")
        app = self._cors if origin is not None and self._is_allowed_origin(origin) else self._checked
        try:
            await app(scope, receive_watched, send_named)
        except Exception as error:
            if record.status == CLIENT_LEFT and not has_left:
                await ApiError.of(error).response()(scope, receive_watched, send_named)
            elif not (has_ended or has_left):
                raise  # half the answer is out: only a broken connection tells the client
        finally:
            self._note(scope)

    def note_refusal(self, scope: Scope, status: int) -> list[tuple[bytes, bytes]]:
        """Log and count a request that the connection refuses. Returns: headers of the answer. Mutates: `scope`."""
        record = self._record(scope)
        record.status = status
        self._note(scope)
        return [(b"x-request-id", record.request_id.encode())]

    # --- Checks ---------------------------------------------------------------------------------

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the head, then read the whole body, then call the application."""
        async with AsyncExitStack() as scope[LEASES_KEY]:
            try:
                # The key comes first: without one a client learns nothing from the other checks.
                self._check_key(scope)
                self._check_names(scope)
                self._check_rights(scope)
                self._check_state(scope)
                room = scope[LEASES_KEY].enter_context(self._bodies.room_of(scope[RECORD_KEY].client_id))
                body = await self._read_body(scope, receive, room)
            except ApiError as error:
                return await error.response()(scope, receive, send)
            scope[RECORD_KEY].begin("validate")
            if body is not None:
                receive = _replayed(body, receive)
                del body  # an answer may take half an hour
                await self._app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        """Identify the caller. Mutates: `scope`. Raises: ApiError 401."""
        caller: Caller | None = ANONYMOUS
        if len(self._keys):
            # Routing uses the same path, which no `Host` header can change.
            token = key_of(scope)
            caller = None if token is None else self._keys.find(token)
            if caller is None and is_open(scope["path"]):
                caller = ANONYMOUS
            if caller is None:
                message = NO_KEY if token is None else UNKNOWN_KEY
                raise ApiError(401, message, code="invalid_api_key", extra_headers={"WWW-Authenticate": "Bearer"})
        scope[RECORD_KEY].caller = caller

    def _check_names(self, scope: Scope) -> None:
        """Refuse DNS rebinding (a web page under a host name that points here), and what pages of other sites send.

        Their pictures, frames and links have no Origin, but `Sec-Fetch-Site`, which programs do not send.
        Raises: ApiError 403.
        """
        host = header_value(scope, b"host") or b""
        if self._hosts is not None and not self._is_known_host(host.decode("latin-1")):
            raise ApiError(
                403,
                "the Host header names a host that this server does not answer for; see --allowed-hosts",
                code="host_not_allowed",
            )
        # Behind a proxy the browser speaks https and this server http.
        own = (b"http://" + host.lower(), b"https://" + host.lower())
        origins = header_values(scope, b"origin")
        from_site = set(header_values(scope, b"sec-fetch-site")) - {b"same-origin", b"none"}
        is_foreign = bool(from_site) and not (origins or is_open(scope["path"]) or "*" in self._origins)
        if is_foreign or any(origin.lower() not in own and not self._is_allowed_origin(origin) for origin in origins):
            raise ApiError(
                403, "pages of this origin may not call the server; see --allowed-origins", code="origin_not_allowed"
            )

    def _check_rights(self, scope: Scope) -> None:
        """Decide whether the caller is an administrator. Mutates: `scope`. Raises: ApiError 403 if it must be one."""
        record, options = scope[RECORD_KEY], self._state.options
        is_owner = record.caller == ANONYMOUS and options.is_local
        record.is_admin = is_owner or options.any_client_is_admin or record.client_id == ADMIN
        if scope["path"] in ADMIN_PATHS and not record.is_admin:
            raise not_admin(scope["path"])

    def _is_known_host(self, value: str) -> bool:
        assert self._hosts is not None
        match = _HOST.fullmatch(value)
        if match is None:
            return False
        name = match[1].lower()
        return not self._hosts.isdisjoint((name, name.strip("[]"))) or is_loopback_address(name)

    def _is_allowed_origin(self, origin: bytes) -> bool:
        return "*" in self._origins or origin.decode("latin-1") in self._origins

    def _check_state(self, scope: Scope) -> None:
        """Count the request if it costs work.

        Raises: ApiError 503 while the server drains or sleeps; ApiError 429 while the queue is full, or beyond the
        caller's limits.
        """
        if self._state.is_draining and scope["path"] not in OPEN_WHILE_DRAINING:
            raise ApiError(
                503,
                "the server is shutting down: ask another one",
                code="draining",
                retry_after_s=self._state.options.drain_timeout_s,
                extra_headers={"Connection": "close"},
            )
        path = scope["path"]
        if scope["method"] == "POST" and not is_open(path):
            is_queued = path in QUEUED_PATHS and not self._state.is_on_demand
            if is_queued and self._state.is_asleep:
                raise asleep()
            self._state.admission.begin(scope[RECORD_KEY], is_queued=is_queued)

    async def _read_body(self, scope: Scope, receive: Receive, room: Room) -> bytes | None:
        """Return the whole body; None if the client left first. Raises: ApiError 413, 415, 429 without room."""
        if any(value.strip().lower() not in (b"", b"identity") for value in header_values(scope, b"content-encoding")):
            raise ApiError(
                415, "send the body without Content-Encoding: it is not decompressed here", code="unsupported_encoding"
            )
        max_bytes = self._state.options.max_body_bytes
        length = header_value(scope, b"content-length") or b""
        num_bytes = int(length) if length.isdigit() else 0
        # One block of memory that grows goes back to the system as a whole; a thousand pieces may not.
        body = bytearray()
        while max(num_bytes, len(body)) <= max_bytes:
            if not room.num_bytes and max(num_bytes, len(body)) > SMALL_BYTES:
                await room.take(num_bytes or max_bytes)
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False) and len(body) <= max_bytes:
                room.keep(len(body))
                return bytes(body)
        raise ApiError(
            413,
            f"the body is larger than {max_bytes} bytes: send less, or raise --max-body-bytes",
            code="body_too_large",
        )

    # --- What is written down -------------------------------------------------------------------

    def _record(self, scope: Scope) -> RequestRecord:
        """Return the record of a request; the first call makes it. Mutates: `scope`."""
        if RECORD_KEY not in scope:
            self._state.metrics.watch_loop()
            scope[RECORD_KEY] = new_record(scope)
        record: RequestRecord = scope[RECORD_KEY]
        return record

    def _note(self, scope: Scope) -> None:
        """Count a request that is over and write its log line, once. Never content, never a key."""
        record = self._record(scope)
        if record.is_noted:
            return
        record.is_noted = True
        if (state := scope.get(STATE_KEY)) is not None and record.num_prompt_tokens:
            state.engines.tell_watchers(record.client_id, record.served_line)
        status, duration_s = record.status, (record.ended_s or time.perf_counter()) - record.started_s
        route = getattr(scope.get("route"), "path", None)
        if route is None and record.caller is not None and scope["path"] in QUEUED_PATHS:
            route = scope["path"]
        self._state.metrics.http_request(scope["method"], route, status, duration_s)
        # Probes come all day and say nothing while they succeed.
        level = logging.DEBUG if record.path in OPEN_PATHS and status < 400 else logging.INFO
        if ACCESS_LOG.isEnabledFor(level) and not (status == 429 and self._is_repeated(record.client_id)):
            is_same = record.engine_id == record.request_id or not record.num_prompt_tokens
            fields: dict[str, object] = {
                "method": record.method,
                "path": record.path,
                "status": status,
                "ms": round(duration_s * 1000, 1),
                "prompt_tokens": record.num_prompt_tokens,
                "cached_tokens": record.num_cached_tokens,
                **({} if record.prefix_broke_at is None else {"prefix_broke_at": record.prefix_broke_at}),
                "generated_tokens": record.num_generated_tokens,
                "key": record.client_id or "-",
                "request_id": record.request_id,
                **({} if is_same else {"engine_id": record.engine_id}),
            }
            ACCESS_LOG.log(level, "request", extra={"fields": fields})

    def _is_repeated(self, client_id: str) -> bool:
        """Count a 429 of a key that had one within `REPEATS_S`: lines would cost more than the answers."""
        if client_id in self._num_repeats:
            self._num_repeats[client_id] += 1
            return True
        self._num_repeats[client_id] = 0
        asyncio.get_running_loop().call_later(REPEATS_S, self._log_repeats, client_id)
        return False

    def _log_repeats(self, client_id: str) -> None:
        num_repeats = self._num_repeats.pop(client_id)
        if num_repeats:
            fields = {"status": 429, "requests": num_repeats, "key": client_id or "-"}
            ACCESS_LOG.info("more requests", extra={"fields": fields})


def header_values(scope: Scope, name: bytes) -> Sequence[bytes]:
    """Return all values of a header; `name` in lower case."""
    return [value for key, value in scope["headers"] if key == name]


def header_value(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header that comes once; None if it is missing or repeated."""
    values = header_values(scope, name)
    return values[0] if len(values) == 1 else None


def key_of(scope: Scope) -> bytes | None:
    """Return the API key: the token of the only `Authorization` header, else the only `x-api-key`, Anthropic's header.

    None if there is neither, or several.
    """
    scheme, _, token = (header_value(scope, b"authorization") or b"").partition(b" ")
    # The name of the scheme is case-insensitive (RFC 9110, section 11.1).
    token = token if scheme.lower() == b"bearer" else header_value(scope, b"x-api-key") or b""
    token = token.strip(b" ")
    return token if 0 < len(token) <= MAX_TOKEN_BYTES else None


def new_record(scope: Scope) -> RequestRecord:
    """Make the record of a request. Its id is the client's if that is short, plain and not the key."""
    token = (key_of(scope) or b"").decode("latin-1")
    given = header_value(scope, b"x-request-id") or b""
    request_id = engine_id = new_request_id()
    if _REQUEST_ID.fullmatch(given) and given.decode("ascii") != token:
        request_id = given.decode("ascii")
        engine_id = f"{request_id}.{engine_id[-8:]}"
    path = scope["path"].replace(token, "[key]") if token else scope["path"]
    traces = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"] if name in _TRACE_HEADERS]
    path, headers = path[:MAX_PATH_CHARACTERS], tuple(traces[:4])
    return RequestRecord(request_id, scope["method"], path, trace_headers=headers, engine_id=engine_id)


def is_open(path: str) -> bool:
    """Return whether a path needs no key: a probe, or a file of the page, which loads before a key is known."""
    return path in OPEN_PATHS or path == "/" or path.startswith("/page/")


def is_loopback_address(name: str) -> bool:
    """Return whether a host, as it stands in a URL, is a loopback address."""
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Make a `receive` that gives the body that was read, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
