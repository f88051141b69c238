"""Files of a model: mapped into memory, or small JSON objects as config.json. It must not know formats.

Next to read: `gguf_file.py`.
"""

import json
import mmap
import os
import re
from pathlib import Path
from typing import Any

from quire.errors import ModelFileError, printable
from quire.files import open_regular, read_regular

MAX_JSON_BYTES = 64 << 20
"""The index of a model with 100,000 tensors has 10 MB."""
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


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises: ModelFileError when it is missing, unreadable, too long, nested too deeply or anything else.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: not a JSON object; fetch it again")
    return value


def read_json(path: Path) -> Any:
    """Read a file that holds one JSON value. Raises: as `read_json_object`."""
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
