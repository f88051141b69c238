"""`from_gguf`, `from_tensors`: the tensors and keys of a model that is to be quantised.

Next to read: `quantize.py`, `export.py`.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.weights.gguf_architectures import ARCHITECTURES
from quire.weights.gguf_config import sampling_keys, translate_config
from quire.weights.gguf_fields import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, TensorNames
from quire.weights.gguf_file import DEFAULT_ALIGNMENT, GGUFFile, GGUFTensor
from quire.weights.weight_tensor import BLOCK_FORMATS, FLOATS, NVFP4, WeightTensor, decode, row_bytes
from quire_workshop.gguf.quantize import ModelToQuantize, SourceTensor
from quire_workshop.gguf.writer import key_value

FP32 = re.compile(r"ffn_gate_inp|ssm_[ad]$|ssm_norm|conv")


def from_gguf(file: GGUFFile, recommended_sampling: Mapping[str, float] | None = None) -> ModelToQuantize:
    """A GGUF file of any architecture. Raises: ModelFileError for a file that is no model.

    `recommended_sampling`: defaults of `SamplingParams` that the file may lack.
    """
    architecture = file.architecture

    def count(name: str, default: int) -> int:
        value: Any = file.metadata.get(f"{architecture}.{name}", default)
        largest = max(value) if isinstance(value, list) and value else value
        return largest if type(largest) is int and largest > 0 else default

    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"{file.path}: there is no matrix 'token_embd.weight': no model to quantise")
    num_heads = count("attention.head_count", 1)
    names = ARCHITECTURES[architecture].tensor_names if architecture in ARCHITECTURES else TensorNames()
    return ModelToQuantize(
        keys={
            **{key: key_value(key, value) for key, value in sampling_keys(recommended_sampling or {}).items()},
            **{key: file.data[place].tobytes() for key, place in file.key_places.items()},
        },
        tensors=tuple(_tensor(file, stored, names) for stored in file.tensors.values()),
        num_layers=count("block_count", 1),
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        num_experts=count("expert_count", 0),
        alignment=file.metadata.get("general.alignment", DEFAULT_ALIGNMENT),
    )


def _tensor(file: GGUFFile, stored: GGUFTensor, names: TensorNames) -> SourceTensor:
    if stored.format is NVFP4:
        raise UnsupportedModelError(
            f"{file.path}: '{printable(stored.name)}' is stored as NVFP4, which is not quantised again: use a "
            "file with floats, or the original model"
        )
    rows = file.rows(stored)
    hf_name = names.huggingface(stored.name)

    def read(first: int, last: int) -> np.ndarray:
        return decode(rows[first:last], stored.format.name)

    return SourceTensor(stored.name, stored.shape, stored.format.name, read, lambda: rows, hf_name)


def from_tensors(
    keys: Mapping[str, Any],
    tensors: Mapping[str, tuple[str | None, list[WeightTensor]]],
    factors: Mapping[str, np.ndarray],
) -> ModelToQuantize:
    """A Hugging Face model under GGUF's names: see `export.py`. `factors`: rotary divisors by name, `[D / 2]`."""
    named = dict(tensors)
    for each, values in factors.items():
        named[each] = (None, [WeightTensor(each, values.shape, "F32", values.view(np.uint8).reshape(1, -1))])
    name = keys["general.architecture"]
    num_heads = keys[f"{name}.attention.head_count"]
    num_kv_heads = keys.get(f"{name}.attention.head_count_kv", num_heads)
    return ModelToQuantize(
        keys={key: key_value(key, value) for key, value in keys.items()},
        tensors=tuple(_stacked(name, *found) for name, found in named.items()),
        num_layers=keys[f"{name}.block_count"],
        num_heads=num_heads,
        num_kv_heads=(max(num_kv_heads) if isinstance(num_kv_heads, list) else num_kv_heads) or 1,
        num_experts=keys.get(f"{name}.expert_count", 0),
    )


def _stacked(name: str, hf_name: str | None, parts: list[WeightTensor]) -> SourceTensor:
    """Vectors, routers and small matrices of states are fp32, as llama.cpp expects them. Parts are of experts or heads
    if there is no `hf_name`."""
    first = parts[0]
    shape = first.shape if len(parts) == 1 else (len(parts), *first.shape)
    is_float = first.format in (*FLOATS, "MXFP4") and not first.offset
    is_kept = is_float and len(first.shape) >= 2 and FP32.search(name) is None
    rows = math.prod(first.shape[:-1])

    def read(start: int, end: int) -> np.ndarray:
        part = parts[start // rows]
        if len(part.shape) != 2:
            return part.to_numpy().reshape(-1, part.shape[-1])[start - start // rows * rows : end]
        at = start // rows * rows
        return part.part(slice(start - at, end - at), slice(None)).to_numpy()

    def copy() -> np.ndarray:
        stored = [part.raw if is_kept else part.to_numpy().astype("<f4").view(np.uint8).reshape(-1) for part in parts]
        return stored[0] if len(stored) == 1 else np.concatenate([each.reshape(-1) for each in stored])

    return SourceTensor(name, shape, first.format if is_kept else "F32", read, copy, hf_name)


def read_back(source: ModelToQuantize, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that a reader of the file will find. Raises: as `translate_config`."""
    tensors, pieces, offset = {}, [], 0
    for tensor in source.tensors:
        block = BLOCK_FORMATS[tensor.format]
        num_bytes = math.prod(tensor.shape[:-1]) * row_bytes(block, tensor.shape[-1])
        is_read = tensor.name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
        tensors[tensor.name] = GGUFTensor(tensor.name, tensor.shape, block, offset, num_bytes if is_read else 0)
        if is_read:
            pieces.append(tensor.copy().reshape(-1))
            offset += num_bytes
    data = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
    return translate_config(GGUFFile(Path("the model as GGUF"), 3, dict(keys), tensors, data))
