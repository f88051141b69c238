"""Weight files of a model, mapped into memory, the names of their parts, and the callback for the progress of work on
them. It must not know formats or terminals.

Next to read: `gguf_file.py`.
"""

import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

from quire.errors import ModelFileError
from quire.files import open_regular

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.ASCII)
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def map_file(path: Path) -> mmap.mmap:
    """Map a file privately: its pages are shared with the page cache until they are written; the file never changes.

    torch refuses read-only memory, so the mapping is writable; without `MAP_NORESERVE` the kernel would demand
    as much free memory as the file is long.

    Raises: ModelFileError when the file is missing, empty, unreadable or no regular file.
    """
    from quire._native import explain_bus_errors  # names of models are looked up without native code

    explain_bus_errors()
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes == 0:
            raise ModelFileError(f"{path}: the file is empty; fetch it again")
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        return mmap.mmap(descriptor, size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be mapped into memory: {error.strerror}") from error
    finally:
        os.close(descriptor)


def split_parts(name: str) -> list[str]:
    """The names of all parts of a split GGUF file, `…-00001-of-00003.gguf`, given one; else the name itself."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    start, _, count = match.groups()
    return [f"{start}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)] or [name]


# --- Progress -------------------------------------------------------------------------------------

Progress = Callable[[str, int, int | None], None]
"""Called during a download, from any thread, with a few words for people, the bytes done, and all bytes if known."""


def ignore_progress(stage: str, done_bytes: int, total_bytes: int | None) -> None:
    """Drop the report."""
