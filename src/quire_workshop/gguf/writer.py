"""`write_gguf`: a GGUF file of version 3 from keys and tensors, which are made one after another.

Must not know architectures or how weights are quantised. Next to read: `quantize.py`, which makes the tensors.
"""

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelFileError
from quire.weights.weight_tensor import BlockFormat, row_bytes

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_UINT32, _INT32, _STRING, _ARRAY = 4, 5, 8, 9
_LIST_TYPES = {_INT32: "<i4", 6: "<f4", 7: "u1"}
_PYTHON_TYPES: dict[type, tuple[int, str]] = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
"""Value types and their codes: integers become uint32, floats float32."""


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor's place in the header, and its rows as pieces of bytes.

    `shape`: in torch's order. `pieces`: uint8 arrays, together the rows in order; they are asked for once.
    """

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    pieces: Iterable[np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        *rows, num_columns = self.shape
        return int(np.prod(rows, dtype=np.int64)) * row_bytes(self.format, num_columns)


def key_value(key: str, value: Any) -> bytes:
    """A key with its value: a string, bool, int (uint32), float (float32), or a list of one of them (ints: int32)."""
    if isinstance(value, list):
        item_type = _value(value[0] if value else "")[0]
        if item_type == _STRING:
            items = b"".join(_string(item) for item in value)
        else:
            item_type = _INT32 if item_type == _UINT32 else item_type
            items = np.array(value, _LIST_TYPES[item_type]).tobytes()
        return _string(key) + _U32.pack(_ARRAY) + _U32.pack(item_type) + _U64.pack(len(value)) + items
    type_id, content = _value(value)
    return _string(key) + _U32.pack(type_id) + content


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return _STRING, _string(value)
    type_id, code = _PYTHON_TYPES[type(value)]
    return type_id, struct.pack(code, value)


def _string(text: str) -> bytes:
    content = text.encode()
    return _U64.pack(len(content)) + content


def write_gguf(path: Path, keys: Mapping[str, bytes], tensors: Sequence[TensorToWrite], *, alignment: int = 32) -> None:
    """Write the file; it has its name only when it is whole. `keys`: as `key_value` makes them.

    Raises: ModelFileError when the file cannot be written.
    """
    header = [b"GGUF", _U32.pack(3), _U64.pack(len(tensors)), _U64.pack(len(keys)), *keys.values()]
    offset = 0
    for tensor in tensors:
        dimensions = tensor.shape[::-1]
        header += [_string(tensor.name), _U32.pack(len(dimensions)), *map(_U64.pack, dimensions)]
        header += [_U32.pack(tensor.format.gguf_id), _U64.pack(offset)]
        offset += tensor.num_bytes + -tensor.num_bytes % alignment
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(b"".join(header))
            file.write(bytes(-file.tell() % alignment))
            for tensor in tensors:
                start = file.tell()
                for piece in tensor.pieces:
                    file.write(np.ascontiguousarray(piece).data)
                assert file.tell() - start == tensor.num_bytes
                file.write(bytes(-file.tell() % alignment))
        unfinished.replace(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
