"""Every error a client can see, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Nothing internal gets out: an unexpected exception becomes a 500 whose message names only its class. Knows no engine.
Next to read: `app.py`, which installs the handlers.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from quire.errors import CapacityError, InvalidParameterError, QuireError, RequestError, nearest
from quire.server.protocol.fields import known_names

LOGGER = logging.getLogger("quire.server")
MAX_ECHOED_CHARACTERS = 200
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Of the other statuses: "invalid_request_error" below 500, "server_error" from there on."""


class ApiError(Exception):
    """An answer that is an error. `retry_after_s` becomes a header, in whole seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """What a client is told of any exception."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, InvalidParameterError):
            return cls(400, error.message, code=error.code, param=error.field)
        if isinstance(error, (RequestError, CapacityError)):
            return cls(error.http_status, error.message, code=error.code)
        if isinstance(error, QuireError):
            status = error.http_status if error.http_status >= 500 else 500
            return cls(503 if error.code == "engine_dead" else status, error.message, code=error.code)
        LOGGER.error("unexpected %s", type(error).__name__, exc_info=error)
        return cls(500, f"internal error: {type(error).__name__}", code="internal_error")

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        message = self.message if len(self.message) <= 2000 else self.message[:1997] + "..."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The headers that go with it."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}

    def response(self) -> Response:
        """The whole answer."""
        return JsonResponse(self.body(), self.status, self.headers())


class JsonResponse(Response):
    """JSON encoded by msgspec."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(content), status_code, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the app OpenAI's shape, those of the framework included."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        return ApiError.of(error).response()

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error).response()

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return ApiError(404, f"no route {request.scope['path'][:200]!r}", code="route_not_found").response()
        if error.status_code == 405:
            message = f"{request.method} is not allowed for {request.scope['path'][:200]!r}"
            answer = ApiError(405, message, code="method_not_allowed").response()
            answer.headers.update(error.headers or {})
            return answer
        return ApiError(error.status_code, str(error.detail)[:MAX_ECHOED_CHARACTERS]).response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(QuireError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_api_error)


def validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a request's body, by the path of its field."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        name = path[-1]
        hint = nearest(name, known_names())
        message = f"unknown field {name[:MAX_ECHOED_CHARACTERS]!r}{hint}"
        return ApiError(400, message, code="unknown_parameter", param=".".join(path))
    param = ".".join(path) or None
    message = first["msg"][:1].lower() + first["msg"][1:]
    given = first.get("input")
    shown = f", got {repr(given)[:80]}" if isinstance(given, (str, int, float, bool, type(None))) else ""
    return ApiError(400, f"{param or 'the body'}: {message}{shown}", code="invalid_parameter", param=param)
