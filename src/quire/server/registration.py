"""Notes of this user's running servers, for `quire ps`: one small JSON file per process.

They lie in the user's state directory. A server removes its note when it ends; `find` removes notes of killed servers.
Knows no HTTP. Next to read: `run.py`, `../cli/top.py`.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import platformdirs
import psutil

from quire import __version__
from quire.files import make_directory, read_own, replace_file

LOGGER = logging.getLogger("quire.server")
SAME_START_S = 2.0
"""Largest difference between two readings of a process's start. A larger one means that its id was used again."""


class ServerNote(msgspec.Struct, frozen=True):
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
        make_directory(path.parent)
        replace_file(path, [msgspec.json.encode(note)])
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
        # Files of another machine with the same home directory, and files that are not notes, stay.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            note = msgspec.json.decode(read_own(path), type=ServerNote)
            if note.host == socket.gethostname() and note.is_running():
                found.append(note)
            elif note.host == socket.gethostname():
                path.unlink()
    return sorted(found, key=lambda note: note.started_s)
