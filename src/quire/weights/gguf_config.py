"""Translate GGUF metadata to the fields of a Hugging Face config.json.

Strict: a metadata key of the architecture that nothing here reads may change the mathematics, so it is an
`UnsupportedModelError`. The model's own code checks names and shapes of the tensors (`runtime/loader.py`).
Keys: `gguf.constants.Keys` of the gguf package. Next to read: `checkpoint.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, nearest, printable
from quire.weights.gguf_architectures import ARCHITECTURES, Architecture, architecture_of
from quire.weights.gguf_fields import add_fields
from quire.weights.gguf_file import GGUFFile
from quire.weights.gguf_metadata import Metadata
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
    metadata = Metadata(file.path, file.metadata, _architecture(file))
    architecture = architecture_of(metadata.values)
    _check_kind(metadata, architecture)
    vocab_size = _vocab_size(file)
    num_layers = metadata.integer("block_count") - metadata.value("nextn_predict_layers", 0)
    if num_layers > len(file.tensors):
        raise ModelFileError(f"{file.path}: {num_layers:,} layers, but only {len(file.tensors)} tensors")
    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count") if architecture.attends else 1
    head_size = metadata.integer("attention.key_length", max(hidden_size // num_heads, 1))
    if architecture.mixes_layers:
        num_kv_heads = max(metadata.counts("attention.head_count_kv", num_layers))
    else:
        num_kv_heads = metadata.integer("attention.head_count_kv", num_heads)
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": _mlp_width(metadata, architecture),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number(architecture.epsilon_key),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.token_id("bos_token_id", vocab_size),
        "eos_token_id": metadata.token_id("eos_token_id", vocab_size),
    }
    if architecture.attends:
        _check_heads(metadata, config)
    if not architecture.has_layer_sizes:
        config["rope_scaling"] = rope_scaling(file, metadata, config)
    add_fields(file, metadata, config)
    _check_unread(metadata, architecture)
    return {architecture.config_names.get(name, name): value for name, value in config.items()}


def translate_generation_config(file: GGUFFile, vocab_size: int) -> dict[str, Any]:
    """generation_config.json: the tokens that the file names as ends, and the sampling defaults if it has any."""
    metadata = Metadata(file.path, file.metadata, "")
    ends = [metadata.token_id(name, vocab_size) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for gguf_name, name in _SAMPLING_DEFAULTS.items():
        value = file.metadata.get(f"general.sampling.{gguf_name}")
        if type(value) is int:
            config[name] = value
        elif isinstance(value, float) and math.isfinite(value):
            config[name] = float(str(np.float32(value)))
    return config


def sampling_keys(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file that give the sampling defaults of a generation_config.json."""
    found = {key: generation_config.get(name) for key, name in _SAMPLING_DEFAULTS.items()}
    return {
        f"general.sampling.{key}": max(value, 0) if key == "top_k" else float(value)
        for key, value in found.items()
        if type(value) is int or (isinstance(value, float) and key != "top_k")
    }


def _architecture(file: GGUFFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(f"{file.path}: the metadata key general.architecture is missing")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: the GGUF architecture '{printable(architecture, limit=80)}' is not supported"
            f"{nearest(architecture, ARCHITECTURES)}; supported are {', '.join(ARCHITECTURES)}"
        )
    return architecture


def _check_kind(metadata: Metadata, architecture: Architecture) -> None:
    num_experts = metadata.value("expert_count", 0)
    if num_experts != 0 and not architecture.has_experts:
        raise UnsupportedModelError(
            f"{metadata.path}: {metadata.key('expert_count')} is {num_experts!r}, which Quire's "
            f"{architecture.model_type} does not have"
        )
    if not metadata.flag("attention.causal", default=True):
        raise UnsupportedModelError(f"{metadata.path}: attention is not causal; Quire runs causal models only")


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


def _check_heads(metadata: Metadata, config: dict[str, Any]) -> None:
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config["head_dim"]
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{metadata.path}: {num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if head_size % 2:
        raise ModelFileError(f"{metadata.path}: the head size {head_size} is odd, so RoPE cannot pair its elements")
    names = ("attention.value_length", "rope.dimension_count")
    architecture = architecture_of(metadata.values)
    for name in () if architecture.has_latents else names[:1] if architecture.rotates_part else names:
        length = metadata.integer(name, head_size)
        if length != head_size:
            raise UnsupportedModelError(
                f"{metadata.path}: {metadata.key(name)} is {length}, another size than the {head_size} of a head"
            )


def _mlp_width(metadata: Metadata, architecture: Architecture) -> int:
    """Return the columns of the MLP, or of an expert's; 0 if layers differ, 1 for a model that has none."""
    if architecture.has_layer_sizes:
        return 0
    if not architecture.attends:
        return 1
    return metadata.integer("feed_forward_length", metadata.values.get(metadata.key("expert_feed_forward_length")))
