"""Bodies: read whole and bounded before the application hears of the request.

So a body that is too large, too slow or never ends costs the application nothing. Next to read: `../connection.py`,
which bounds the time.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import ApiError
from quire.server.gate.headers import header_value, header_values


class BodyLimit:
    """Answers 413 to bodies above `max_bytes`, whether announced or not, and 415 to compressed ones."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        try:
            self._check_headers(scope)
            body = await self._read(receive)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        if body is None:  # the client left before its body was there
            return
        await self._app(scope, _replay(body, receive), send)

    def _check_headers(self, scope: Scope) -> None:
        encodings = [value.strip().lower() for value in header_values(scope, b"content-encoding")]
        if any(encoding not in (b"", b"identity") for encoding in encodings):
            raise ApiError(415, "send the body without Content-Encoding: it is not decompressed here",
                           code="unsupported_encoding")  # fmt: skip
        length = header_value(scope, b"content-length")
        if length is not None and length.isdigit() and (len(length) > 15 or int(length) > self._max_bytes):
            raise self._too_large()

    async def _read(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            if part:
                parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._max_bytes} bytes: send less, or raise --max-body-bytes",
            code="body_too_large",
        )  # fmt: skip


def _replay(body: bytes, receive: Receive) -> Receive:
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given, body
        if is_given:
            return await receive()
        is_given = True
        message = {"type": "http.request", "body": body, "more_body": False}
        body = b""
        return message

    return receive_again
