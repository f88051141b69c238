"""While the queue is full, whoever would wait in it is sent away before anything is read or parsed.

Whether a request fits is decided again, with all that is known of it, by `../admission.py`. Next to read: `body.py`.
"""

from dataclasses import dataclass

from starlette.types import Scope

from quire.server.caller import ANONYMOUS, SCOPE_KEY
from quire.server.errors import ApiError
from quire.server.state import ServerState

COMPUTING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})
"""Whose routes take a place in the queue."""


@dataclass(frozen=True, slots=True)
class _Route:
    """The little that logs and metrics ask of a route."""

    path: str


class Crowd:
    """Answers 429 with `Retry-After` where there is no room for one more completion."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def refusal(self, scope: Scope) -> ApiError | None:
        """Whether there is no room. Mutates: `scope`, which then names the route, as the application would."""
        if scope["method"] != "POST" or scope["path"] not in COMPUTING_PATHS:
            return None
        try:
            self._state.admission.check_room(scope.get(SCOPE_KEY, ANONYMOUS), 1)
        except ApiError as error:
            scope["route"] = _Route(scope["path"])
            return error
        return None
