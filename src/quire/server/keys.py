"""API keys, from a file or the environment, and their callers. Knows no HTTP.

Only the SHA-256 of a key is kept. A token is hashed and compared with all keys in constant time, so that the time of a
refusal does not tell how much of a guess was right. Next to read: `gate.py`.
"""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from quire.errors import ConfigError
from quire.server.options import ServerOptions
from quire.server.request_record import Caller

VARIABLE = "QUIRE_API_KEY"
ADMIN = "admin"
"""Name of the key that may use `gate.ADMIN_PATHS`."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")
_SALT_OF = b"quire prefix cache of one key"


class KeyRing:
    """All keys of one server."""

    def __init__(self, names: Mapping[str, str | None]) -> None:
        """`names`: key → name of its owner, or None for a name made from the hash. Raises: ConfigError."""
        self._callers: list[tuple[bytes, Caller]] = []
        client_ids: set[str] = set()
        for key, name in names.items():
            if not _KEY.fullmatch(key):
                raise ConfigError(
                    "an API key has 1 to 512 visible ASCII characters and no spaces: make one with "
                    "`openssl rand -hex 32`"
                )
            digest = hashlib.sha256(key.encode()).digest()
            client_id = name or f"key-{digest.hex()[:8]}"
            if client_id in client_ids:
                raise ConfigError(f"two API keys are named {client_id!r}: give each a name of its own")
            client_ids.add(client_id)
            salt = hmac.new(key.encode(), _SALT_OF, hashlib.sha256).hexdigest()[:32]
            self._callers.append((digest, Caller(client_id, salt)))

    @classmethod
    def load(cls, options: ServerOptions, environment: Mapping[str, str]) -> "KeyRing":
        """Read the keys of the file and of the environment. Raises: ConfigError, which never shows a key."""
        names: dict[str, str | None] = {}
        if VARIABLE in environment:
            keys = [key.strip() for key in environment[VARIABLE].split(",")]
            if not any(keys):
                raise ConfigError(f"{VARIABLE} is set but empty: unset it, or put a key there")
            names |= dict.fromkeys((key for key in keys if key), None)
        if options.api_key_file is not None:
            names |= _read_file(Path(options.api_key_file))
        return cls(names)

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, token: bytes) -> Caller | None:
        """Return the caller of a token, or None. Every key is compared, whichever matches."""
        digest = hashlib.sha256(token).digest()
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def _read_file(path: Path) -> dict[str, str | None]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"api_key_file={str(path)!r} is not a file")
        if status.st_uid == os.getuid() and status.st_mode & stat.S_IROTH:
            raise ConfigError(f"api_key_file={str(path)!r} can be read by everybody: run chmod o-r on it")
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file={str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file={str(path)!r} is not plain ASCII text") from None
    found: list[tuple[str, str | None]] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, colon, key = text.partition(":")
        if colon and not _NAME.fullmatch(name):
            raise ConfigError(f"api_key_file={str(path)!r}, line {number}: a name has up to 64 letters, digits, _ . -")
        found.append((key.strip(), name) if colon else (text, None))
    if not found:
        raise ConfigError(f"api_key_file={str(path)!r} has no key in it")
    if len({key for key, _ in found}) < len(found):
        raise ConfigError(f"api_key_file={str(path)!r} has one key twice")
    return dict(found)


def check_exposure(options: ServerOptions, keys: KeyRing) -> None:
    """Refuse a public address without a key. Raises: ConfigError."""
    if options.is_local or len(keys) or options.insecure:
        return
    raise ConfigError(
        f"host={options.host!r} can be reached from other machines and there is no API key: set {VARIABLE}, "
        "or --api-key-file, or listen on 127.0.0.1; --insecure serves everybody"
    )
