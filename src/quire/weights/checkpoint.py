"""`Checkpoint`: the configuration and the named weights of a model on disk, the same for GGUF and Hugging Face.

Must not know modules, devices or tensor parallelism. Next to read: `gguf_file.py` or `safetensors_file.py`,
then `runtime/loader.py`, which consumes this.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.weights.gguf_architectures import ARCHITECTURES
from quire.weights.gguf_config import translate_config, translate_generation_config
from quire.weights.gguf_file import GGUFFile, read_gguf
from quire.weights.gguf_names import huggingface_name, is_rotary_projection, rotary_row_order
from quire.weights.model_cache import list_cached
from quire.weights.model_files import read_json_object
from quire.weights.safetensors_file import read_directory
from quire.weights.sources import ModelFiles
from quire.weights.weight_tensor import WeightTensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a model except its tokenizer. Each weight is read when the loader asks for it."""

    files: ModelFiles
    format: str
    """"gguf" or "safetensors"."""
    hf_config: Mapping[str, Any]
    """config.json, or its translation from GGUF metadata; always has a non-empty "architectures"."""
    generation_config: Mapping[str, Any]
    """generation_config.json, or its translation; may be empty."""
    metadata: Mapping[str, Any]
    """GGUF keys and values; empty for Hugging Face directories."""
    tensors: Mapping[str, WeightTensor]
    """Weights by Hugging Face name, in the layout of Hugging Face's modules."""

    @property
    def num_parameters(self) -> int:
        """Weights in the files; a tied head counts once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Size of the weights as stored."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def open_checkpoint(files: ModelFiles, *, with_tensors: bool = True) -> Checkpoint:
    """Read configuration and headers; no weight is decoded yet.

    `with_tensors=False` leaves `tensors` empty, for models with random weights: a directory then needs no weight files.

    Raises: ModelFileError for missing, truncated or contradictory files; UnsupportedModelError for models that Quire
    would compute wrongly.
    """
    open_files = _open_gguf if files.kind == "gguf" else _open_directory
    try:
        return open_files(files, with_tensors=with_tensors)
    except ModelFileError as error:
        cached = [] if files.origin == "local" else list_cached()
        for name in (model.name for model in cached if model.path.parent in files.path.parents):
            raise ModelFileError(f"{error}: `quire rm {name}`, then `quire pull {name}`") from error
        raise


def _open_gguf(files: ModelFiles, *, with_tensors: bool) -> Checkpoint:
    file = read_gguf(files.path)
    config = translate_config(file)
    generation_config = {**files.recommended_sampling, **translate_generation_config(file, config["vocab_size"])}
    tensors = _named_tensors(file, config) if with_tensors else {}
    return Checkpoint(files, "gguf", config, generation_config, file.metadata, tensors)


def _named_tensors(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, WeightTensor]:
    architecture = ARCHITECTURES[file.metadata["general.architecture"]]
    tensors = {}
    for stored in file.tensors.values():
        if name := huggingface_name(stored.name, architecture.names):
            is_reordered = architecture.reorders_pairs and is_rotary_projection(stored.name)
            row_order = rotary_row_order(stored.shape[0], config["head_dim"]) if is_reordered else None
            offset = -architecture.norm_offset if name.endswith("norm.weight") else 0.0
            values = file.rows(stored)
            tensors[name] = WeightTensor(name, stored.shape, stored.format.name, values, row_order, offset=offset)
    return tensors


def _open_directory(files: ModelFiles, *, with_tensors: bool) -> Checkpoint:
    config_path = files.path / "config.json"
    config = read_json_object(config_path)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelFileError(f"{config_path}: 'architectures' is missing; it names the model class to run")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{config_path}: weights quantised with {printable(str(method), limit=80)} are not supported yet; use a "
            "GGUF file or the original model"
        )
    generation_path = files.path / "generation_config.json"
    generation_config = read_json_object(generation_path) if generation_path.is_file() else {}
    tensors: Mapping[str, WeightTensor] = read_directory(files.path) if with_tensors else {}
    return Checkpoint(files, "safetensors", config, generation_config, {}, tensors)
