"""By what name, and from which web pages, the server may be called.

A web page that is open in a browser can send requests to this machine, under a host name that its owner points
here (DNS rebinding) or as a form. Names and origins that are not known are refused. Next to read: `cors.py`.
"""

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import Scope

from quire.server.errors import ApiError
from quire.server.gate.headers import header_value, header_values
from quire.server.options import ServerOptions

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")


class KnownHosts:
    """Answers 403 where the `Host` or `Origin` header is none of ours.

    Any host name will do on a public address without `allowed_hosts`.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._names: frozenset[str] | None = None
        if options.is_local or options.allowed_hosts:
            self._names = frozenset(name.lower() for name in (options.host, "localhost", *options.allowed_hosts))
        self._origins = frozenset(origin.lower() for origin in options.allowed_origins)

    def refusal(self, scope: Scope) -> ApiError | None:
        """What is wrong with where a request is sent to, or comes from."""
        host = header_value(scope, b"host")
        if not self._knows_host(host):
            return ApiError(403, "the Host header names a host that this server does not answer for; see "
                                 "--allowed-hosts", code="host_not_allowed")  # fmt: skip
        if not self._knows_origin(header_values(scope, b"origin"), host or b""):
            return ApiError(403, "pages of this origin may not call the server; see --allowed-origins",
                            code="origin_not_allowed")  # fmt: skip
        return None

    def _knows_host(self, value: bytes | None) -> bool:
        if self._names is None:
            return True
        match = _HOST.fullmatch((value or b"").decode("latin-1"))
        if match is None:
            return False
        name = match[1].lower()
        return name in self._names or name.strip("[]") in self._names or is_loopback_address(name)

    def _knows_origin(self, values: Iterable[bytes], host: bytes) -> bool:
        # Behind a proxy the browser speaks https and this server http.
        allowed = {b"http://" + host.lower(), b"https://" + host.lower()}
        for value in values:
            origin = value.lower()
            if "*" not in self._origins and origin.decode("latin-1") not in self._origins and origin not in allowed:
                return False
        return True


def is_loopback_address(name: str) -> bool:
    """Whether a host, as a URL has it, is an address of this machine to itself."""
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
