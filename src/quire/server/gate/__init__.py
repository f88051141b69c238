"""What stands between the network and the application: plain ASGI layers, each with one thing to refuse.

From outside to inside: `access.py` (names and logs), `cors.py`, `checks.py` (`authentication.py`, `hosts.py`,
`draining.py`, `crowd.py`), `body.py`. They look at the raw scope and deny by default; no route has to ask for
protection. Below them is `../connection.py`, behind them `../admission.py`.
"""

import os

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError
from quire.server.gate.access import Access
from quire.server.gate.authentication import Authentication
from quire.server.gate.body import BodyLimit
from quire.server.gate.checks import Checks
from quire.server.gate.cors import Cors
from quire.server.gate.crowd import Crowd
from quire.server.gate.draining import Draining
from quire.server.gate.hosts import KnownHosts
from quire.server.gate.keys import KeyRing, check_exposure
from quire.server.state import ServerState


def wrap(app: ASGIApp, state: ServerState, keys: KeyRing | None = None) -> "Gate":
    """The application behind its gate. `keys` None: those of the options and the environment.

    Raises: ConfigError for keys that cannot be had, and if strangers could use the server.
    """
    options = state.options
    keys = KeyRing.load(options, os.environ) if keys is None else keys
    check_exposure(options, keys)
    return Gate(app, state, keys)


class Gate:
    """An ASGI application, whose refusals can also be had without a task, a layer and a message of ASGI each.

    They must cost next to nothing: what a server cannot serve comes on the same cores that compute for others.
    """

    def __init__(self, app: ASGIApp, state: ServerState, keys: KeyRing) -> None:
        options = state.options
        body = BodyLimit(app, options.max_body_bytes)
        self._checks = Checks(body, Authentication(keys), KnownHosts(options), Draining(state), Crowd(state))
        self._cors = Cors(self._checks, options.allowed_origins)
        self._access = Access(self._cors, state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. The server has no WebSockets, and nothing may come in past the gate."""
        if scope["type"] == "http":
            await self._access(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    def refusal(self, scope: Scope) -> tuple[ApiError, list[tuple[bytes, bytes]]] | None:
        """What is answered to a request that its head is enough to refuse, with more headers; it is noted as over.

        None if the application, called with the same scope, must answer. Mutates: `scope`.
        """
        if self._cors.is_preflight(scope):
            return None
        record = self._access.begin(scope)
        try:
            error = self._checks.refusal(scope)
        except Exception as exception:
            error = ApiError.of(exception)
        if error is None:
            return None
        record.status = error.status
        self._access.note(scope)
        return error, [*self._access.headers(scope), *self._cors.headers(scope)]

    def note_refusal(self, scope: Scope, status: int) -> list[tuple[bytes, bytes]]:
        """Write down what the connection refused by itself. Returns the headers of the answer. Mutates: `scope`."""
        record = self._access.begin(scope)
        record.status = status
        self._access.note(scope)
        return [(b"x-request-id", record.request_id.encode())]
