"""What stands between the network and the application: plain ASGI layers, each with one thing to refuse.

From outside to inside: `access.py` (names and logs), `cors.py`, `authentication.py`, `hosts.py`, `draining.py`,
`crowd.py`, `body.py`. They look at the raw scope and deny by default; no route has to ask for protection.
Below them is `../connection.py`, behind them `../admission.py`.
"""

import os

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.gate.access import Access
from quire.server.gate.authentication import Authentication
from quire.server.gate.body import BodyLimit
from quire.server.gate.cors import Cors
from quire.server.gate.crowd import Crowd
from quire.server.gate.draining import Draining
from quire.server.gate.hosts import KnownHosts
from quire.server.gate.keys import KeyRing, check_exposure
from quire.server.state import ServerState


def wrap(app: ASGIApp, state: ServerState, keys: KeyRing | None = None) -> ASGIApp:
    """The application behind its gate. `keys` None: those of the options and the environment.

    Raises: ConfigError for keys that cannot be had, and if strangers could use the server.
    """
    options = state.options
    keys = KeyRing.load(options, os.environ) if keys is None else keys
    check_exposure(options, keys)
    app = BodyLimit(app, options.max_body_bytes)
    app = Crowd(app, state)
    app = Draining(app, state)
    app = KnownHosts(app, options)
    app = Authentication(app, keys)
    if options.allowed_origins:
        app = Cors(app, options.allowed_origins)
    return _HttpOnly(Access(app, state))


class _HttpOnly:
    """Closes what is no HTTP request: the server has no WebSockets, and nothing may come in past the gate."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
