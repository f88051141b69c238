"""Files that other users of the machine may have put in place: opened without waiting for a FIFO or following a link.

`open_own` opens what Quire keeps for itself below its cache, state and data directories: no other user can have
changed it. Models come from any source, so that `open_regular` asks for no owner.
Next to read: `runtime/shared_file.py`, `runtime/block_files.py`.
"""

import errno
import json
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quire.errors import ModelFileError, QuireError, UnsupportedModelError, printable

logger = logging.getLogger("quire.files")
MAX_JSON_BYTES = 64 << 20
"""The index of a model with 100,000 tensors has 10 MB."""
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
FileState = tuple[str, int, int, int, int]
"""Path, size in bytes, times of modification and of change (ns), and inode: a program that writes a file may set all
but the time of change, which copies, links and new permissions set too."""


class UnsafeFileError(OSError):
    """A file or directory that is not used, because it is none or because another user may have changed it."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; one that is made is for this user alone. Raises: UnsafeFileError, OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeFileError(errno.EINVAL, "is no regular file", str(path))
    return descriptor


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file that no other user can change, in a directory of which the same holds.

    Raises: UnsafeFileError, OSError.
    """
    check_own(path.parent, os.stat(path.parent))
    try:
        descriptor = open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UnsafeFileError(errno.ELOOP, "is a link", str(path)) from None
    try:
        status = os.fstat(descriptor)
        check_own(path, status)
        if flags & os.O_RDWR and status.st_nlink > 1:
            raise UnsafeFileError(errno.EMLINK, "has another name, whose file would be written", str(path))
    except UnsafeFileError:
        os.close(descriptor)
        raise
    return descriptor


def check_own(path: Path, status: os.stat_result) -> None:
    """Raises: UnsafeFileError unless only this user, or root, can change a file or the names in a directory."""
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafeFileError(errno.EPERM, f"belongs to the user {status.st_uid}", str(path))
    if status.st_mode & _WRITTEN_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        advice = f"`chmod go-w {path}` keeps them out"
        raise UnsafeFileError(errno.EPERM, f"can be written by other users (mode {mode:o}): {advice}", str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. Raises: UnsafeFileError, OSError."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def read_own(path: Path) -> bytes:
    """Return the content of a file that no other user can change. Raises: UnsafeFileError, OSError."""
    with open(open_own(path), "rb") as file:
        return file.read()


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a model's file that holds one JSON object.

    Raises: ModelFileError when it is missing, unreadable, too long, nested too deeply or anything else.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: not a JSON object but a {type(value).__name__}; fetch it again")
    return value


def read_json(path: Path) -> Any:
    """Read a model's file that holds one JSON value. Raises: as `read_json_object`."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            raise ModelFileError(f"{path}: {size_bytes:,} bytes, but such a file has at most {MAX_JSON_BYTES:,}")
        value = json.loads(read_regular(path).decode())
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
        raise ModelFileError(f"{path}: not valid JSON: {problem}; fetch it again") from error
    return value


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file in each error of a reader, also in what it raises on damage that it does not look for.

    Readers check what they use and name the key; the rest is for libraries, and for what a reader forgot.
    Raises: ModelFileError, UnsupportedModelError.
    """
    try:
        yield
    except (ModelFileError, UnsupportedModelError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except (QuireError, ImportError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelFileError(f"{path}: damaged ({problem_of(error)}); fetch it again") from error


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of the tokenizers library, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


def problem_of(error: BaseException) -> str:
    """Return the first line of what a library says of a file, for a message."""
    return printable((str(error).splitlines() or [type(error).__name__])[0])


def find_own(path: Path) -> bytes | None:
    """Return the content of a file as `read_own` does; None if there is none, with a warning if it is not safe."""
    try:
        return read_own(path)
    except UnsafeFileError as error:
        logger.warning("%s %s; %s is not used", error.filename, error.strerror, path.name)
    except OSError:
        pass
    return None


def replace_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file, for this user alone, under another name, then give it its name. Raises: OSError."""
    import tempfile  # some milliseconds, which verbs that only read do not need

    descriptor, unfinished = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        try:
            if os.writev(descriptor, parts) != sum(map(len, parts)):  # the rest is refused when it is tried
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, for this user alone. Raises: OSError."""
    if not path.is_dir():
        if path != path.parent:
            make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def file_state(path: Path) -> FileState:
    """Return the state of a file, which is another one after any change. Raises: OSError."""
    status = path.stat()
    return str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
