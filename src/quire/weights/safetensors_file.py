"""Read safetensors files, one or several shards, as views of the mapped files.

The safetensors library checks each header against the file's length. Never reads pickles. Must not know models.
Next to read: `checkpoint.py`.
"""

import math
from pathlib import Path

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.files import read_json_object
from quire.weights.model_files import map_file
from quire.weights.weight_tensor import WeightTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
MAX_NAME_LEN = 200
_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "consolidated*.pth")


def read_directory(directory: Path) -> dict[str, WeightTensor]:
    """All tensors of a Hugging Face directory, from `model.safetensors` or from the shards of its index.

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


def _read_shards(directory: Path) -> dict[str, WeightTensor]:
    index_path = directory / INDEX_FILE
    index = read_json_object(index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index_path}: has no 'weight_map'; fetch it again")
    shards: dict[str, dict[str, WeightTensor]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", "..") or len(shard) > MAX_NAME_LEN:
            shown = printable(repr(shard), limit=80)
            raise ModelFileError(f"{index_path}: {shown} of '{name}' is no name of a file in this directory")
        if shard not in shards:
            path = directory / shard
            if not path.is_file():
                raise ModelFileError(f"{directory}: the shard {printable(shard)} is missing; fetch the model again")
            shards[shard] = read_safetensors(path)
        if name not in shards[shard]:
            raise ModelFileError(f"{directory / shard}: tensor '{printable(name)}' of the index is missing")
        tensors[name] = shards[shard][name]
    return tensors


def read_safetensors(path: Path) -> dict[str, WeightTensor]:
    """The tensors of one file, as views of the mapped file.

    Raises: ModelFileError naming the file and what is wrong; UnsupportedModelError for a dtype that is not known here.
    """
    from safetensors import SafetensorError, safe_open

    mapping = map_file(path)
    try:
        with safe_open(path, framework="numpy") as file:
            headers = {name: file.get_slice(name) for name in file.offset_keys()}
            described = [(name, header.get_dtype(), tuple(header.get_shape())) for name, header in headers.items()]
    except (SafetensorError, OSError) as error:
        problem = printable(str(error).removeprefix("Error while deserializing header: "), limit=200)
        raise ModelFileError(f"{path}: truncated or corrupted ({problem}); fetch it again") from error
    data = np.frombuffer(mapping, dtype=np.uint8)
    # The library has checked that the tensors follow the header without gaps, to the end of the file.
    position = 8 + int.from_bytes(mapping[:8], "little")
    tensors = {}
    for name, dtype, shape in described:
        if dtype not in _ITEM_BYTES:
            raise UnsupportedModelError(f"{path}: tensor '{printable(name)}' has the dtype {dtype}, which is not read")
        num_rows, row_bytes = math.prod(shape[:-1]), (shape[-1] if shape else 1) * _ITEM_BYTES[dtype]
        stored = data[position : position + num_rows * row_bytes].reshape(num_rows, row_bytes)
        tensors[name] = WeightTensor(name, shape, dtype, stored)
        position += stored.size
    return tensors
