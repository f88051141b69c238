"""`open_source`: the tensors and keys of a model that is to be quantised, from a GGUF file.

Next to read: `quantize.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import ModelFileError
from quire.weights.dequantize import decode
from quire.weights.gguf_architectures import ARCHITECTURES
from quire.weights.gguf_file import DEFAULT_ALIGNMENT, GGUFFile, GGUFTensor, read_gguf
from quire.weights.gguf_names import huggingface_name
from quire.weights.quantize import Source, SourceTensor
from quire.weights.sources import ModelFiles


def open_source(files: ModelFiles) -> Source:
    """Open a model to quantise. Raises: ModelFileError, UnsupportedModelError."""
    return from_gguf(read_gguf(files.path))


def from_gguf(file: GGUFFile) -> Source:
    """A GGUF file of any architecture. Raises: ModelFileError for a file that is no model."""
    architecture = file.metadata.get("general.architecture")

    def count(name: str, default: int) -> int:
        value: Any = file.metadata.get(f"{architecture}.{name}", default)
        largest = max(value) if isinstance(value, list) and value else value
        return largest if type(largest) is int and largest > 0 else default

    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"{file.path}: there is no matrix 'token_embd.weight': no model to quantise")
    num_heads = count("attention.head_count", 1)
    names = ARCHITECTURES[architecture].names if architecture in ARCHITECTURES else None
    return Source(
        keys={key: file.data[place].tobytes() for key, place in file.key_places.items()},
        tensors=tuple(_tensor(file, stored, names) for stored in file.tensors.values()),
        num_layers=count("block_count", 1),
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        num_experts=count("expert_count", 0),
        alignment=file.metadata.get("general.alignment", DEFAULT_ALIGNMENT),
    )


def _tensor(file: GGUFFile, stored: GGUFTensor, names: Mapping[str, str] | None) -> SourceTensor:
    rows = file.rows(stored)
    hf_name = huggingface_name(stored.name, names)

    def read(first: int, last: int) -> np.ndarray:
        return decode(rows[first:last], stored.format.name)

    return SourceTensor(stored.name, stored.shape, stored.format.name, read, lambda: rows, hf_name)
