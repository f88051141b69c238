"""`read_json_object`: the JSON files beside weights, as config.json and an index of shards, as dictionaries.

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
    """Read a file that holds one JSON object.

    Raises: ModelFileError when it is missing, unreadable, too long, nested too deeply or anything else.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise ModelFileError(f"{path}: {size_bytes:,} bytes, but such a file has at most {MAX_FILE_BYTES:,}")
        value = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
        raise ModelFileError(f"{path}: not valid JSON: {problem}; fetch it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: not a JSON object; fetch it again")
    return value
