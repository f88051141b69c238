"""Leave for chosen web pages to read the answers (CORS); for none, unless origins are chosen.

Next to read: `hosts.py`, which refuses all other origins.
"""

import re
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.gate.headers import adding, header_value

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9, _-]{1,1000}")
EXPOSED = b"x-request-id, retry-after, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens"
MAX_AGE_S = 600


class Cors:
    """Answers preflights, which carry no key, and marks answers as readable for the origins chosen."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.lower() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        headers = self.headers(scope)
        if not self.is_preflight(scope):
            return await self._app(scope, receive, adding(send, headers) if headers else send)
        wanted = header_value(scope, b"access-control-request-headers") or b"authorization, content-type"
        if _HEADER_NAMES.fullmatch(wanted):
            headers.append((b"access-control-allow-headers", wanted))
        headers += [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-max-age", str(MAX_AGE_S).encode()),
        ]
        await Response(status_code=204)(scope, receive, adding(send, headers))

    def is_preflight(self, scope: Scope) -> bool:
        """Whether the page of a chosen origin asks what it may send; such a request carries no key."""
        if scope["method"] != "OPTIONS" or header_value(scope, b"access-control-request-method") is None:
            return False
        return bool(self.headers(scope))

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """What an answer has for the page of a chosen origin; nothing for others."""
        origin = header_value(scope, b"origin")
        if origin is None or not self._allows(origin):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"vary", b"Origin"),
            (b"access-control-expose-headers", EXPOSED),
        ]

    def _allows(self, origin: bytes) -> bool:
        return "*" in self._origins or origin.decode("latin-1").lower() in self._origins
