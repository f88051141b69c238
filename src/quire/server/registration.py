"""Notes of this user's running servers, for `quire ps`: one small JSON file per process.

They lie in the user's state directory. A server removes its note when it ends; `find` removes notes of killed servers.
Knows no HTTP. Next to read: `run.py`, `../cli/ps.py`.
"""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
import psutil

from quire import __version__

LOGGER = logging.getLogger("quire.server")
SAME_START_S = 2.0
"""Largest difference between two readings of a process's start. A larger one means that its id was used again."""


@dataclass(frozen=True, slots=True)
class ServerNote:
    """A server. `started_s`: start of its process, since 1970."""

    pid: int
    url: str
    model: str
    started_s: float
    host: str
    version: str

    def is_running(self) -> bool:
        """Return whether the process is still that server."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started_s) < SAME_START_S
            return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False


def directory() -> Path:
    """Return the directory of the notes. `XDG_STATE_HOME` moves it."""
    return Path(platformdirs.user_state_dir("quire", appauthor=False)) / "servers"


@contextlib.contextmanager
def registered(url: str, model: str) -> Iterator[None]:
    """Keep a note of this process while the body runs. If it cannot be written, the log says so."""
    path = directory() / f"{socket.gethostname()}-{os.getpid()}.json"
    started_s = psutil.Process().create_time()
    note = ServerNote(os.getpid(), url, model, started_s, socket.gethostname(), __version__)
    try:
        _write(path, note)
    except OSError as error:
        LOGGER.info("quire ps will not know this server: %s: %s", path.parent, error.strerror)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def find() -> list[ServerNote]:
    """Return the servers that run on this machine, oldest first. Mutates: removes notes of servers that are gone."""
    found = []
    for path in sorted(directory().glob("*.json")):
        note = _read(path)
        if note is None or note.host != socket.gethostname():
            continue  # another machine with the same home directory, or not a note
        if note.is_running():
            found.append(note)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda note: note.started_s)


def _write(path: Path, note: ServerNote) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(note)), encoding="utf-8")
    os.replace(temporary, path)


def _read(path: Path) -> ServerNote | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        note = ServerNote(**values)
    except (OSError, ValueError, TypeError):
        return None
    texts = (note.url, note.model, note.host, note.version)
    is_note = isinstance(note.pid, int) and isinstance(note.started_s, (int, float))
    is_note = is_note and all(isinstance(text, str) for text in texts)
    return note if is_note and note.url.startswith(("http://", "https://")) else None
