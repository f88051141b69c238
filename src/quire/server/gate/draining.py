"""While the server is told to stop, new work is sent elsewhere. Next to read: `../run.py`, which says when."""

from starlette.types import Scope

from quire.server.errors import ApiError
from quire.server.state import ServerState

OPEN_WHILE_DRAINING = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version"})


class Draining:
    """Answers 503 to whatever comes after the server was told to stop; who watches it is still answered."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def refusal(self, scope: Scope) -> ApiError | None:
        """Whether a request comes too late."""
        if not self._state.is_draining or scope["path"] in OPEN_WHILE_DRAINING:
            return None
        return ApiError(
            503, "the server is shutting down: ask another one", code="draining",
            retry_after_s=self._state.options.drain_timeout_s, extra_headers={"Connection": "close"},
        )  # fmt: skip
