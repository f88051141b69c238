"""Model files mapped into memory, and their text made printable for messages. It must not know formats.

Next to read: `gguf_file.py`.
"""

import mmap
import os
from pathlib import Path

from quire.errors import ModelFileError

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def map_file(path: Path) -> mmap.mmap:
    """Map a file privately: its pages are shared with the page cache until they are written; the file never changes.

    torch refuses read-only memory, so the mapping is writable; without `MAP_NORESERVE` the kernel would demand
    as much free memory as the file is long.

    Raises: ModelFileError when the file is missing, empty, unreadable or no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes == 0:
            raise ModelFileError(f"{path}: the file is empty or not a regular file; fetch it again")
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        return mmap.mmap(descriptor, size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be mapped into memory: {error.strerror}") from error
    finally:
        os.close(descriptor)


def printable(text: str, *, limit: int = 300) -> str:
    """Text that holds names from an untrusted file, as one line of bounded length for an error message."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:limit])
    return shown if len(text) <= limit else shown + "…"
