"""Caller of a request, which the gate identifies once and puts into the ASGI scope.

Next to read: `keys.py`, where callers come from.
"""

from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection

SCOPE_KEY = "quire.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """An API key, or the anonymous caller of a server without keys.

    `client_id` names it in the scheduler, in limits and in logs; `cache_salt` separates its prefix cache from others.
    """

    client_id: str = "anonymous"
    cache_salt: str = ""

    def identity(self, priority: int | None, cache_salt: str | None = None) -> dict[str, Any]:
        """Return the arguments of `InputProcessor.prepare` about the caller; `cache_salt` is the request's own."""
        return {
            "priority": priority or 0,
            "client_id": self.client_id,
            "cache_salt": self.cache_salt + (cache_salt or ""),
        }


ANONYMOUS = Caller()


def caller_of(request: HTTPConnection) -> Caller:
    """Return the caller of a request."""
    caller = request.scope.get(SCOPE_KEY, ANONYMOUS)
    assert isinstance(caller, Caller)
    return caller
