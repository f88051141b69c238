"""Importance matrices: the mean squared activation of each input column of the matrices of a model.

Read from llama.cpp's files, GGUF and the older .dat, and written as its GGUF. Next to read: `../importance.py`,
which measures them, and `quantize.py`, which weights errors with them.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quire.errors import ModelFileError, printable
from quire.weights.gguf_file import read_gguf
from quire.weights.model_files import map_file
from quire.weights.weight_tensor import BLOCK_FORMATS
from quire_workshop.gguf.writer import TensorToWrite, key_value, write_gguf

Importance = Mapping[str, np.ndarray]
"""By tensor name of a GGUF file: fp32, the columns of one matrix after the other."""
SUMS, COUNTS = ".in_sum2", ".counts"
_I32 = struct.Struct("<i")


def read_importance(path: Path) -> dict[str, np.ndarray]:
    """Read an importance matrix. Raises: ModelFileError for a file of another kind, or a damaged one."""
    with map_file(path) as mapping:
        is_gguf = mapping[:4] == b"GGUF"
        found = {} if is_gguf else _read_legacy(path, bytes(mapping))
    if is_gguf:
        file = read_gguf(path)
        for name, stored in file.tensors.items():
            if name.endswith(SUMS) and (counts := file.tensors.get(name.removesuffix(SUMS) + COUNTS)):
                if stored.format.name != "F32" or counts.format.name != "F32":
                    raise ModelFileError(f"{path}: '{printable(name)}' is not F32: no importance matrix")
                sums = file.rows(stored).view("<f4")
                times = file.rows(counts).view("<f4").reshape(-1, 1)
                if len(times) != len(sums):
                    raise ModelFileError(f"{path}: '{printable(name)}' has {len(sums)} rows, {len(times)} counts")
                # Experts that no token chose are as important as any other.
                means = np.where(times > 0, sums / np.maximum(times, 1), 1)
                found[name.removesuffix(SUMS)] = means.astype(np.float32).reshape(-1)
    bad = next((name for name, values in found.items() if not np.all(np.isfinite(values) & (values >= 0))), None)
    if bad is not None or not found:
        problem = (
            f"'{printable(bad)}' has values below 0 or not finite" if bad else "there are no sums of squares in it"
        )
        raise ModelFileError(f"{path}: no importance matrix: {problem}")
    return found


def _read_legacy(path: Path, content: bytes) -> dict[str, np.ndarray]:
    """Per entry: length of the name, name, number of calls, number of values, fp32 sums."""
    found = {}
    try:
        (count,), position = _I32.unpack_from(content), 4
        for _ in range(count):
            (length,) = _I32.unpack_from(content, position)
            name = content[position + 4 : position + 4 + length].decode()
            calls, num_values = struct.unpack_from("<ii", content, position + 4 + length)
            position += 12 + length
            values = np.frombuffer(content, "<f4", num_values, position)
            found[name] = values / np.float32(max(calls, 1))
            position += 4 * num_values
    except (struct.error, ValueError) as error:
        raise ModelFileError(f"{path}: no importance matrix of llama.cpp: {printable(str(error))}") from error
    return found


def write_importance(path: Path, importance: Importance, dataset: str, *, num_tokens: int, window_len: int) -> None:
    """Write the file that llama.cpp's tools read. Raises: ModelFileError when it cannot be written."""
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": [dataset],
        "imatrix.chunk_count": num_tokens // window_len,
        "imatrix.chunk_size": window_len,
    }
    counts = np.full((1, 1), num_tokens, np.float32)
    tensors = []
    for name, means in importance.items():
        for suffix, values in ((SUMS, means.reshape(1, -1) * counts), (COUNTS, counts)):
            tensors.append(TensorToWrite(name + suffix, values.shape, BLOCK_FORMATS["F32"], [values.view(np.uint8)]))
    write_gguf(path, {key: key_value(key, value) for key, value in keys.items()}, tensors)
