"""Translate GGUF metadata to the fields of a Hugging Face config.json, and tell where the values of a tensor lie in
Hugging Face's.

Strict: a metadata key of the architecture that nothing here reads may change the mathematics, so it is an
`UnsupportedModelError`. The model's own code checks names and shapes of the tensors (`runtime/loader.py`).
Keys: `gguf.constants.Keys` of the gguf package; views: llama.cpp's converter. Next to read: `checkpoint.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, nearest, printable
from quire.weight_map import Offset, Rows, Transpose, View
from quire.weights.gguf_architectures import ARCHITECTURES, Architecture, architecture_of
from quire.weights.gguf_fields import is_rotary_projection, read_fields, rotary_row_order
from quire.weights.gguf_file import LARGEST_FP32, GGUFFile, Metadata
from quire.weights.gguf_rope import rope_scaling

_KEYS_WITHOUT_EFFECT = frozenset({
    "vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type",
    # Without scaling, or without such attention:
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier",
    "rope.dimension_count", "attention.value_length", "expert_used_count",
})  # fmt: skip

_SAMPLING_DEFAULTS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def translate_config(file: GGUFFile) -> dict[str, Any]:
    """Translate the metadata to the config.json that this model has, or would have, on the Hugging Face hub.

    Raises: UnsupportedModelError for another architecture or a key that is not understood; ModelFileError when a key is
    missing or of the wrong type.
    """
    metadata = Metadata(file, _architecture(file))
    architecture, vocab_size = architecture_of(file.metadata), _vocab_size(file)
    if not metadata.flag("attention.causal", default=True):
        raise UnsupportedModelError(f"{file.path}: attention is not causal; Quire runs causal models only")
    if (num_layers := metadata.integer("block_count")) > len(file.tensors):
        raise ModelFileError(f"{file.path}: {num_layers:,} layers, but only {len(file.tensors)} tensors")
    config = metadata.fields
    config |= {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        **{
            field: any(name.endswith(f".{part}") for name in file.tensors)
            for field, part in architecture.biases.items()
        },
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.token_id("bos_token_id", vocab_size),
        "eos_token_id": metadata.token_id("eos_token_id", vocab_size),
    }
    read_fields(architecture.base_rows, metadata)
    if architecture.predictors:
        config[architecture.predictors] = metadata.num_predictors
    if "head_dim" in config:
        config["rope_scaling"] = rope_scaling(metadata)
    read_fields(architecture.fields, metadata)
    config |= {name: value(config) if callable(value) else value for name, value in architecture.unsaid.items()}
    if architecture.finish is not None:
        architecture.finish(metadata)
    _check_unread(metadata, architecture)
    names = {name: architecture.config_names.get(name, name) for name in config}
    return {names[name]: value for name, value in config.items() if names[name]}


def translate_generation_config(file: GGUFFile, vocab_size: int) -> dict[str, Any]:
    """generation_config.json: the tokens that the file names as ends, and the sampling defaults if it has any."""
    metadata = Metadata(file)
    ends = [metadata.token_id(name, vocab_size) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for gguf_name, name in _SAMPLING_DEFAULTS.items():
        value = file.metadata.get(f"general.sampling.{gguf_name}")
        if type(value) is int:
            config[name] = value
        elif isinstance(value, float) and abs(value) <= LARGEST_FP32:
            config[name] = float(str(np.float32(value)))
    return config


def sampling_keys(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file that give the sampling defaults of a generation_config.json."""
    found = {key: generation_config.get(name) for key, name in _SAMPLING_DEFAULTS.items()}
    return {
        f"general.sampling.{key}": max(value, 0) if key == "top_k" else float(value)
        for key, value in found.items()
        if (type(value) is int and abs(value) < 2**31)
        or (isinstance(value, float) and key != "top_k" and abs(value) <= LARGEST_FP32)
    }


def _architecture(file: GGUFFile) -> str:
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: the GGUF architecture '{printable(architecture, limit=80)}' is not supported"
            f"{nearest(architecture, ARCHITECTURES)}; supported are {', '.join(ARCHITECTURES)}"
        )
    return architecture


def _check_unread(metadata: Metadata, architecture: Architecture) -> None:
    """Raises: UnsupportedModelError for a key of the architecture that was not read; 0 switches most keys off."""
    for name in metadata.unread():
        if name not in _KEYS_WITHOUT_EFFECT | architecture.unused_keys:
            raise UnsupportedModelError(
                f"{metadata.path}: the metadata key '{printable(metadata.key(name))}' is not understood and may change "
                "the mathematics"
            )


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.path}: there is no matrix 'token_embd.weight'; is it a vocabulary-only file?")
    return embedding.shape[0]


# --- Views of tensors; layers with state have theirs in `gguf_recurrent.py` -----------------------


def file_views(name: str, num_rows: int, architecture: Architecture, config: Mapping[str, Any]) -> tuple[View, ...]:
    """Return the views of a file's tensor, by its GGUF name, that are Hugging Face's tensor.

    The elements of a rotated pair are side by side in a file, and norms have their 1. GPT-2's matrices have outputs as
    rows there, GPT-NeoX's queries lie before keys and values instead of head by head. Raises: ModelFileError.
    """
    is_fused = architecture.model_type == "gpt_neox" and ".attn_qkv." in name
    if is_fused or (architecture.reorders_pairs and is_rotary_projection(name)):
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if num_rows % (3 * size if is_fused else size):
            raise ModelFileError(f"the rows of '{printable(name)}' are not whole heads of {size}")
        if not is_fused:
            return (Rows(rotary_row_order(num_rows, size)),)
        return (Rows(np.arange(num_rows).reshape(3, -1, size).swapaxes(0, 1).reshape(-1)),)
    if architecture.model_type == "gpt2" and name.startswith("blk."):
        return (Transpose(),)
    has_offset = architecture.norm_offset and name.endswith("norm.weight") and "ssm_norm" not in name
    return (Offset(-architecture.norm_offset),) if has_offset else ()
