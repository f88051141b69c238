"""Files as another user of the machine leaves them where Quire keeps its own."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

OTHER_USER = 65534


def make_fifo(path: Path) -> None:
    """Put a FIFO in the place of a file. A reader that waits for it reads nothing in the end, and its test fails."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    end = threading.Timer(5.0, os.close, [os.open(path, os.O_RDWR | os.O_NONBLOCK)])
    end.daemon = True
    end.start()


def make_link(path: Path) -> Path:
    """Put a link in the place of a file. Returns: the file that it names, of this user."""
    target = path.with_name("diary")
    target.write_bytes(path.read_bytes() if path.exists() else b"dear diary")
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return target


def let_others_write(path: Path) -> None:
    """Give a file or a directory to the group, too."""
    path.chmod(path.stat().st_mode | 0o020)


def give_away(path: Path) -> None:
    """Give a file to another user, which only root can."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, OTHER_USER, -1)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "is no regular file": make_fifo, "is a link": make_link, "can be written by other users": let_others_write,
    f"belongs to the user {OTHER_USER}": give_away,
}  # fmt: skip
"""By the reason why such a file is not used."""
