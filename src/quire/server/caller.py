"""Who sent a request: found out once, by the gate in front of the application, and carried in the ASGI scope.

Next to read: `gate/keys.py`, where callers come from.
"""

from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection

SCOPE_KEY = "quire.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """One API key, or nobody where none is needed.

    `client_id` names it in the scheduler, in limits and in logs; `cache_salt` keeps its prefix cache its own.
    """

    client_id: str = "anonymous"
    cache_salt: str = ""

    def identity(self, priority: int | None, cache_salt: str | None = None) -> dict[str, Any]:
        """What `InputProcessor.prepare` must know of a request of this caller; `cache_salt` is the request's own."""
        return {
            "priority": priority or 0,
            "client_id": self.client_id,
            "cache_salt": self.cache_salt + (cache_salt or ""),
        }


ANONYMOUS = Caller()


def caller_of(request: HTTPConnection) -> Caller:
    """Whose request this is."""
    caller = request.scope.get(SCOPE_KEY, ANONYMOUS)
    assert isinstance(caller, Caller)
    return caller
