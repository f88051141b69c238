"""Who may come in: everything but the two probes needs an API key, where the server has any.

The path is the one that routes are chosen by, `scope["path"]`, never one made of the `Host` header.
Next to read: `keys.py`.
"""

from starlette.types import Scope

from quire.server.caller import ANONYMOUS, SCOPE_KEY, Caller
from quire.server.errors import ApiError
from quire.server.gate.headers import OPEN_PATHS, header_values
from quire.server.gate.keys import KeyRing
from quire.server.request_record import RECORD_KEY

MAX_TOKEN_BYTES = 1024
NO_KEY = "this server needs an API key, sent as `Authorization: Bearer KEY`"
UNKNOWN_KEY = "this API key is not known here: check it, or ask for one of this server"
"""Never the key itself, nor a part of it."""


class Authentication:
    """Lets callers with a key through and names them; answers 401 to all others."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def refusal(self, scope: Scope) -> ApiError | None:
        """What is wrong with a request's key. Mutates: `scope`, which names the caller from now on."""
        token = bearer_token(scope)
        caller = self._identify(scope, token)
        if caller is None:
            message = NO_KEY if token is None else UNKNOWN_KEY
            return ApiError(401, message, code="invalid_api_key", extra_headers={"WWW-Authenticate": "Bearer"})
        if RECORD_KEY in scope:
            scope[RECORD_KEY].client_id = caller.client_id
        scope[SCOPE_KEY] = caller
        return None

    def _identify(self, scope: Scope, token: bytes | None) -> Caller | None:
        if not len(self._keys):
            return ANONYMOUS
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
