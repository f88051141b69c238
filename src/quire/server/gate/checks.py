"""The questions that the head of a request answers, asked one after the other, before anything behind it is read.

Next to read: `authentication.py`, `hosts.py`, `draining.py`, `crowd.py`, one question each.
"""

from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError

PASSED_KEY = "quire.passed"


class Check(Protocol):
    """One question."""

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why the request is refused; None if it is not."""


class Checks:
    """Lets through what no check refuses. Who comes first is heard first: strangers learn nothing from the others."""

    def __init__(self, app: ASGIApp, *checks: Check) -> None:
        self._app = app
        self._checks = checks

    def refusal(self, scope: Scope) -> ApiError | None:
        """The first refusal. Mutates: `scope`; whoever has passed is not asked again."""
        for check in self._checks:
            error = check.refusal(scope)
            if error is not None:
                return error
        scope[PASSED_KEY] = True
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        error = None if PASSED_KEY in scope else self.refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response()(scope, receive, send)
