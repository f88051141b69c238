"""The JSON files beside weights (config.json, an index of shards) and inside them, as dictionaries.

Next to read: `checkpoint.py`.
"""

import json
from pathlib import Path
from typing import Any

from quire.errors import ModelFileError
from quire.weights.mapped_file import printable

MAX_FILE_BYTES = 64 << 20
"""The index of a model with 100,000 tensors has 10 MB."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises: ModelFileError when it is missing, unreadable, absurdly long or something else.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise ModelFileError(f"{path}: {size_bytes:,} bytes, but such a file has at most {MAX_FILE_BYTES:,}")
        text = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json_object(path, text, what="file")


def parse_json_object(path: Path, text: bytes, *, what: str) -> dict[str, Any]:
    """The JSON object in `text`, which is `what` part of the file `path`.

    Raises: ModelFileError for anything else, also for nesting too deep to parse.
    """
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
        raise ModelFileError(f"{path}: the {what} is not valid JSON: {problem}; fetch it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: the {what} is JSON, but no object; fetch it again")
    return value
