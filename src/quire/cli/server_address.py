"""Where a server is and with which key: for every verb that speaks to one. Knows no HTTP client.

Next to read: `server_client.py`, `load_client.py`.
"""

import contextlib
import os
from urllib.parse import urlsplit

from quire.errors import QuireError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("QUIRE_API_KEY", "OPENAI_API_KEY")


class ServerUnreachableError(QuireError):
    """There is no server of models at the address."""

    code = "server_unreachable"
    exit_code = 5


def base_url(url: str) -> str:
    """An address as people write it ("host:8000", "http://host:8000/v1") to one without the API's version.

    Raises: ServerUnreachableError.
    """
    whole = url if "://" in url else f"http://{url}"
    with contextlib.suppress(ValueError):
        parts = urlsplit(whole)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
    raise ServerUnreachableError(f"--url {url!r} is not the address of a server: http://host:port")


def api_key() -> str:
    """The user's key: the first of `QUIRE_API_KEY`, else `OPENAI_API_KEY`; empty without one."""
    return _found_key()[1]


def key_hint() -> str:
    """About a key that a server refused: which variable to set, or where it came from; the server says why."""
    name, key = _found_key()
    return f"the key sent is that of {name}" if key else f"set {KEY_VARIABLES[0]}"


def _found_key() -> tuple[str, str]:
    for name in KEY_VARIABLES:
        key = os.environ.get(name, "").split(",")[0].strip()
        if key:
            return name, key
    return "", ""
