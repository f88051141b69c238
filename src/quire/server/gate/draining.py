"""While the server is told to stop, new work is sent elsewhere. Next to read: `../run.py`, which says when."""

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError
from quire.server.state import ServerState

OPEN_WHILE_DRAINING = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version"})


class Draining:
    """Answers 503 to whatever comes after the server was told to stop; who watches it is still answered."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if not self._state.is_draining or scope["path"] in OPEN_WHILE_DRAINING:
            return await self._app(scope, receive, send)
        error = ApiError(
            503, "the server is shutting down: ask another one", code="draining",
            retry_after_s=self._state.options.drain_timeout_s,
        )  # fmt: skip
        response = error.response()
        response.headers["Connection"] = "close"
        await response(scope, receive, send)
