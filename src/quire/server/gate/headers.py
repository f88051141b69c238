"""Reading and writing headers of raw ASGI messages. Next to read: `access.py`."""

from collections.abc import Iterable
from typing import Any

from starlette.types import Message, Scope, Send

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
"""What probes ask for without a key."""


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header; `name` in lower case."""
    return [value for key, value in scope["headers"] if key == name]


def header_value(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header that comes once; None if it is missing, or comes more often."""
    values = header_values(scope, name)
    return values[0] if len(values) == 1 else None


def adding(send: Send, headers: Iterable[tuple[bytes, bytes]]) -> Send:
    """A `send` that adds headers to the answer."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = with_headers(message, headers)
        await send(message)

    return send_with_headers


def with_headers(message: Message, headers: Iterable[tuple[bytes, bytes]]) -> Message:
    """An answer's first message with more headers."""
    found: list[Any] = [*message.get("headers", ()), *headers]
    return {**message, "headers": found}
