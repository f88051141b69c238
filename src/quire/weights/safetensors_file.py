"""Read safetensors files, one or several shards, as views of the mapped files. Trusts no field of a header.

A file is an 8-byte length, a JSON header of that length, then the tensors without gaps. Never reads pickles.
Must not know models. Format: huggingface.co/docs/safetensors. Next to read: `checkpoint.py`.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError
from quire.weights.json_file import parse_json_object, read_json_object
from quire.weights.mapped_file import map_file, printable
from quire.weights.weight_tensor import MappedTensor

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors package."""
MAX_DIMENSIONS = 16
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "consolidated*.pth")


def read_directory(directory: Path) -> dict[str, MappedTensor]:
    """All tensors of a Hugging Face directory, from `model.safetensors` or from the shards its index lists.

    Raises: ModelFileError naming a missing shard or what is wrong; UnsupportedModelError when there are only pickles.
    """
    if (directory / INDEX_FILE).is_file():
        return _read_shards(directory)
    if (directory / SINGLE_FILE).is_file():
        return read_safetensors(directory / SINGLE_FILE)
    if shards := sorted(directory.glob("model-*.safetensors")):
        raise ModelFileError(f"{directory}: has {shards[0].name} but not {INDEX_FILE}; fetch the missing file")
    if any(next(directory.glob(pattern), None) for pattern in _PICKLE_PATTERNS):
        raise UnsupportedModelError(
            f"{directory}: has only PyTorch pickles, which can run code and are never loaded; convert them with "
            "transformers' `save_pretrained`, which writes safetensors"
        )
    raise ModelFileError(f"{directory}: has no weights, neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_shards(directory: Path) -> dict[str, MappedTensor]:
    index_path = directory / INDEX_FILE
    index = read_json_object(index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index_path}: has no 'weight_map'; fetch it again")
    shards: dict[str, dict[str, MappedTensor]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise ModelFileError(f"{index_path}: {printable(repr(shard))} is no name of a file in this directory")
        if shard not in shards:
            path = directory / shard
            if not path.is_file():
                raise ModelFileError(f"{directory}: the shard {printable(shard)} is missing; fetch the model again")
            shards[shard] = read_safetensors(path)
        if name not in shards[shard]:
            raise ModelFileError(f"{directory / shard}: tensor '{printable(name)}' of the index is missing")
        tensors[name] = shards[shard][name]
    return tensors


def read_safetensors(path: Path) -> dict[str, MappedTensor]:
    """The tensors of one file, checked to cover its data exactly.

    Raises: ModelFileError naming the file and what is wrong.
    """
    mapping = map_file(path)
    data = np.frombuffer(mapping, dtype=np.uint8)
    if data.size < 8:
        raise ModelFileError(f"{path}: only {data.size} bytes long; fetch it again")
    header_bytes = int.from_bytes(mapping[:8], "little")
    if header_bytes > MAX_HEADER_BYTES or header_bytes > data.size - 8:
        raise ModelFileError(
            f"{path}: claims a header of {header_bytes:,} bytes in a file of {data.size:,}; it is truncated or no "
            "safetensors file, fetch it again"
        )
    header = parse_json_object(path, mapping[8 : 8 + header_bytes], what="header")
    header.pop("__metadata__", None)
    body = data[8 + header_bytes :]
    tensors = {}
    expected_begin = 0
    entries = [_parse_entry(path, name, entry) for name, entry in header.items()]
    for name, dtype, shape, begin, end in sorted(entries, key=lambda entry: entry[3:]):
        if begin != expected_begin or end > body.size:
            problem = f"tensor '{name}' lies at bytes {begin:,} to {end:,} of {body.size:,}"
            problem += ", past the end" if end > body.size else f", the one before ends at {expected_begin:,}"
            raise ModelFileError(f"{path}: {printable(problem)}; the file is corrupted, fetch it again")
        expected_begin = end
        # reshape(-1) cannot tell the width of a tensor without elements.
        row_bytes = (shape[-1] if shape else 1) * _ITEM_BYTES[dtype]
        stored = body[begin:end].reshape(math.prod(shape[:-1]), row_bytes)
        tensors[name] = MappedTensor(name, shape, dtype, stored)
    if expected_begin != body.size:
        raise ModelFileError(
            f"{path}: {body.size - expected_begin:,} bytes after the last tensor; the file is corrupted, fetch it again"
        )
    return tensors


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, dtype, shape, begin and end of one tensor, begin and end relative to the first tensor's first byte."""
    shown = f"{path}: tensor '{printable(name)}'"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{shown} is not described by dtype, shape and data_offsets; the file is corrupted")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ModelFileError(f"{shown} has the unknown dtype {printable(repr(dtype), limit=80)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        raise ModelFileError(f"{shown} has a bad shape or bad data_offsets; the file is corrupted")
    begin, end = offsets
    needed = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != needed:
        raise ModelFileError(f"{shown}, {dtype} {shape}, needs {needed:,} bytes but has {end - begin:,}")
    return name, dtype, tuple(shape), begin, end


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
