"""Errors of the API, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, and in Anthropic's below
`/v1/messages`.

Nothing internal gets out: an unexpected exception becomes a 500 with only its class in the message. Knows no engine.
Next to read: `routes/__init__.py`, which installs the handlers.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import CapacityError, ContextLengthError, InvalidParameterError, QuireError, RequestError, nearest
from quire.server.keys import ADMIN
from quire.server.request_record import CLIENT_LEFT, RECORD_KEY
from quire.server.sending import UNSHARED

LOGGER = logging.getLogger("quire.server")
BUSY_S = 2.0
"""`Retry-After` of a 429 that names no time."""
MAX_ECHOED_CHARACTERS = 200
MAX_MESSAGE_CHARACTERS = 2000
TOO_LONG = "this model's maximum context length is exceeded: "
"""OpenAI's words: LiteLLM and others recognise the error by them, and cut the prompt or ask a larger model."""
MESSAGES_TOO_LONG = "prompt is too long: "
"""Anthropic's words, with the two numbers: agents recognise the error by them, and summarise their conversation."""
_TOKENS_AND_LIMIT = re.compile(r"(\d+) tokens[,;] the context holds (\d+)")
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Error types by status. Others: "invalid_request_error" below 500, "server_error" from 500 on."""
MESSAGES_PATH = "/v1/messages"
MESSAGES_TYPES = {
    **TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Anthropic's error types by status. Others: "invalid_request_error" below 500, "api_error" from 500 on."""


class ClientDisconnected(Exception):
    """The client disconnected before its answer was complete."""


class ApiError(Exception):
    """An error answer. `retry_after_s` becomes a header, in whole seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        extra_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.extra_headers = extra_headers or {}

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """Return the error answer for any exception."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, InvalidParameterError):
            message = f"{error.field} must be {error.limit}, got {shown(error.value)}"
            return cls(400, message, code=error.code, param=error.field)
        if isinstance(error, ContextLengthError):
            return cls(error.http_status, TOO_LONG + error.message, code=error.code)
        if isinstance(error, (RequestError, CapacityError)):
            retry_after_s = BUSY_S if error.http_status == 429 else None
            return cls(error.http_status, error.message, code=error.code, retry_after_s=retry_after_s)
        if isinstance(error, QuireError):
            status = error.http_status if error.http_status >= 500 else 500
            return cls(503 if error.code == "engine_dead" else status, error.message, code=error.code)
        LOGGER.error("unexpected %s", type(error).__name__, exc_info=error)
        return cls(500, f"internal error: {type(error).__name__}", code="internal_error")

    @property
    def type(self) -> str:
        """Return OpenAI's name for the kind of error."""
        return TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return {"error": {"message": _cut(self.message), "type": self.type, "param": self.param, "code": self.code}}

    def messages_body(self, request_id: str | None) -> dict[str, Any]:
        """Return the JSON body in Anthropic's shape, which has no field for `param`: the message begins with it."""
        kind = MESSAGES_TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "api_error")
        is_named = self.param is None or self.param in self.message
        message = self.message if is_named else f"{self.param}: {self.message}"
        if message.startswith(TOO_LONG):
            numbers = _TOKENS_AND_LIMIT.search(message)
            words = f"{MESSAGES_TOO_LONG}{numbers[1]} tokens > {numbers[2]} maximum: " if numbers else MESSAGES_TOO_LONG
            message = words + message.removeprefix(TOO_LONG)
        content: dict[str, Any] = {"type": kind, "message": _cut(message)}
        if self.code is not None:
            content["details"] = {"error_code": self.code}
        return {"type": "error", "error": content, "request_id": request_id}

    def headers(self) -> dict[str, str]:
        """Return the headers."""
        if self.retry_after_s is None:
            return dict(self.extra_headers)
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s))), **self.extra_headers}

    def response(self) -> Response:
        """Return the whole answer."""
        return _ErrorResponse(self)


def not_admin(what: str) -> ApiError:
    """Return the refusal of a request that would change what other clients get."""
    message = f"{what} changes what other clients get: it needs the API key that --api-key-file names {ADMIN!r}, or a "
    return ApiError(403, message + "server that was started with --any-client-is-admin", code="not_admin")


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else message[: MAX_MESSAGE_CHARACTERS - 3] + "..."


def is_messages_path(path: str) -> bool:
    """Return whether a route is one of Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


class _ErrorResponse(Response):
    """An error in the shape of the API that the request's path belongs to."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        error, body = self._error, self._error.body()
        if is_messages_path(scope["path"]):
            record = scope.get(RECORD_KEY)
            body = error.messages_body(None if record is None else record.request_id)
        await JsonResponse(body, error.status, error.headers())(scope, receive, send)


class JsonResponse(Response):
    """JSON encoded by msgspec."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(content), status_code, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Mutates: it lets go of its body, which may be large and read slowly."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        message = {"type": "http.response.body", "body": self.body, UNSHARED: True}
        self.body = b""
        await send(message)


def shown(value: Any) -> str:
    """Return a client's value for an error message, as JSON of at most 80 characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)} items"
    if isinstance(value, str):
        text = json.dumps(value[:80], ensure_ascii=False)
        return text if len(value) <= 80 else text[:-1] + '..."'
    text = json.dumps(value) if isinstance(value, (int, float, type(None))) else "a value of another type"
    return text[:80]


def install_error_handlers(app: Starlette, paths: Sequence[str] = ()) -> None:
    """Give every error of the app OpenAI's shape, those of the framework included.

    `paths`: known routes, for the hint in a 404.
    """

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect | ClientDisconnected):
            return Response(status_code=CLIENT_LEFT)
        if isinstance(error, HTTPException):
            error = _routing_error(error, request, paths)
        return ApiError.of(error).response()

    for kind in (ClientDisconnect, ClientDisconnected, ApiError, QuireError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)


def _routing_error(error: HTTPException, request: Request, paths: Sequence[str]) -> ApiError:
    path = request.scope["path"][:MAX_ECHOED_CHARACTERS]
    if error.status_code == 404:
        return ApiError(404, f"no route {json.dumps(path)}{nearest(path, paths)}", code="route_not_found")
    if error.status_code == 405:
        message = f"{request.method[:20]} is not allowed for {json.dumps(path)}"
        return ApiError(405, message, code="method_not_allowed", extra_headers=error.headers)
    return ApiError(error.status_code, str(error.detail)[:MAX_ECHOED_CHARACTERS])
