"""Who may come in: everything but the two probes needs an API key, where the server has any.

The path is the one that routes are chosen by, `scope["path"]`, never one made of the `Host` header.
Next to read: `keys.py`.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.caller import ANONYMOUS, SCOPE_KEY, Caller
from quire.server.errors import ApiError
from quire.server.gate.headers import OPEN_PATHS, header_values
from quire.server.gate.keys import KeyRing
from quire.server.request_record import current_record

MAX_TOKEN_BYTES = 1024


class Authentication:
    """Lets callers with a key through and names them; answers 401 to all others."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        caller = self._identify(scope)
        if caller is None:
            error = ApiError(
                401, "this server needs an API key, sent as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
            response = error.response()
            response.headers["WWW-Authenticate"] = "Bearer"
            return await response(scope, receive, send)
        record = current_record()
        if record is not None:
            record.client_id = caller.client_id
        scope[SCOPE_KEY] = caller
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Caller | None:
        if not len(self._keys):
            return ANONYMOUS
        token = bearer_token(scope)
        caller = None if token is None else self._keys.find(token)
        return ANONYMOUS if caller is None and scope["path"] in OPEN_PATHS else caller


def bearer_token(scope: Scope) -> bytes | None:
    """The token of the one `Authorization` header; None if there is none, or more than one of either."""
    values = header_values(scope, b"authorization")
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    token = token.strip(b" ")
    # The name of the scheme is case-insensitive (RFC 9110, section 11.1).
    if scheme.lower() != b"bearer" or not 0 < len(token) <= MAX_TOKEN_BYTES:
        return None
    return token
