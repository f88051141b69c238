"""Translate GGUF metadata to the fields of a Hugging Face config.json, and check the tensors against it.

Strict: a metadata key of the architecture that is not understood here may change the mathematics, so it is an
`UnsupportedModelError`, and so is a tensor that has no place in the model. Must not decode weights.
Keys: `gguf.constants.Keys` of the gguf package. Next to read: `checkpoint.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, nearest, printable
from quire.weights.gguf_architectures import ARCHITECTURES, EXPERTS, MLP, Architecture, architecture_of
from quire.weights.gguf_fields import add_fields, stores_apart
from quire.weights.gguf_file import GGUFFile
from quire.weights.gguf_gemma4 import FULL, gemma4_shapes
from quire.weights.gguf_metadata import Metadata
from quire.weights.gguf_names import huggingface_name, predicts_further
from quire.weights.gguf_recurrent import StateSizes, delta_net_shapes, state_space_shapes
from quire.weights.gguf_rope import rope_scaling

_UNDERSTOOD_KEYS = frozenset({
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "attention.causal", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "expert_count", "expert_used_count",
    # Without effect on the mathematics:
    "vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type",
})  # fmt: skip

_TURN_ENDS = {"gemma4": ("<turn|>", "<|tool_response>")}
"""Tokens that end a turn, of tokenizers whose files name one end only."""
_SAMPLING_DEFAULTS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def translate_config(file: GGUFFile) -> dict[str, Any]:
    """Translate the metadata to the config.json that this model has, or would have, on the Hugging Face hub.

    Raises: UnsupportedModelError for another architecture or anything not understood; ModelFileError when a key is
    missing or of the wrong type, or a tensor is missing or of another shape than the metadata says.
    """
    metadata = Metadata(file.path, file.metadata, _architecture(file))
    architecture = architecture_of(metadata.values)
    _check_keys(metadata)
    vocab_size = _vocab_size(file)
    num_layers = metadata.integer("block_count") - metadata.value("nextn_predict_layers", 0)
    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count") if architecture.attends else 1
    head_size = metadata.integer("attention.key_length", max(hidden_size // num_heads, 1))
    by_layer = architecture.sizes_by_layer
    if architecture.hybrid_parts or by_layer:
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
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.token_id("bos_token_id", vocab_size),
        "eos_token_id": metadata.token_id("eos_token_id", vocab_size),
    }
    if architecture.attends:
        _check_heads(metadata, config)
    config["rope_scaling"] = None if by_layer else rope_scaling(file, metadata, config)
    add_fields(file, metadata, config)
    _check_tensors(file, metadata, config)
    return {architecture.config_names.get(name, name): value for name, value in config.items()}


def translate_generation_config(file: GGUFFile, vocab_size: int) -> dict[str, Any]:
    """generation_config.json: every token that ends a turn, and the sampling defaults if the file has any."""
    metadata = Metadata(file.path, file.metadata, "")
    ends = [metadata.token_id(name, vocab_size) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    if names := _TURN_ENDS.get(str(file.metadata.get("tokenizer.ggml.model"))):
        ends += [index for index, token in enumerate(file.metadata["tokenizer.ggml.tokens"]) if token in names]
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


def _check_keys(metadata: Metadata) -> None:
    prefix = metadata.architecture + "."
    understood = _UNDERSTOOD_KEYS | architecture_of(metadata.values).keys
    for key in metadata.values:
        if key.startswith(prefix) and key.removeprefix(prefix) not in understood:
            raise UnsupportedModelError(
                f"{metadata.path}: the metadata key '{printable(key)}' is not understood and may change the mathematics"
            )
    if (metadata.values.get(prefix + "expert_count", 0) != 0) != architecture_of(metadata.values).has_experts:
        raise UnsupportedModelError(
            f"{metadata.path}: {metadata.key('expert_count')} is {metadata.values.get(prefix + 'expert_count', 0)!r}, "
            f"which Quire's {architecture_of(metadata.values).model_type} does not have"
        )
    if metadata.values.get(prefix + "attention.causal", True) is not True:
        raise UnsupportedModelError(f"{metadata.path}: attention is not causal; Quire runs causal models only")


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
    if architecture.sizes_by_layer:
        return 0
    if not architecture.attends:
        return 1
    return metadata.integer("feed_forward_length", metadata.values.get(metadata.key("expert_feed_forward_length")))


def _check_tensors(file: GGUFFile, metadata: Metadata, config: dict[str, Any]) -> None:
    """Check that the file has exactly the tensors of this model, each of the shape that the metadata give."""
    num_layers = config["num_hidden_layers"]
    if num_layers > len(file.tensors):
        raise ModelFileError(f"{file.path}: {num_layers:,} layers, but only {len(file.tensors)} tensors")
    expected = _expected_shapes(file, metadata, config)
    architecture, width = architecture_of(metadata.values), config["hidden_size"]
    for name, shape in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{file.path}: tensor '{name}' is missing")
        if tensor.shape != shape and (tensor.shape, shape) != ((width,), (1, width)):
            raise ModelFileError(
                f"{file.path}: tensor '{name}' has the shape {tensor.shape}, the metadata give {shape}"
            )
    for name in file.tensors:
        is_further = metadata.has("nextn_predict_layers") and predicts_further(name, num_layers)
        if name not in expected and name not in architecture.factor_tensors and not is_further:
            where = "in this model" if huggingface_name(name, architecture.names) else "in any supported one"
            raise UnsupportedModelError(f"{file.path}: tensor '{printable(name)}' has no place {where}")


def _expected_shapes(file: GGUFFile, metadata: Metadata, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    architecture = architecture_of(metadata.values)
    if architecture.sizes_by_layer:
        return gemma4_shapes(file, config)
    width, mlp_width, vocab_size = config["hidden_size"], config.get("intermediate_size", 0), config["vocab_size"]
    num_heads = config["num_attention_heads"] if architecture.attends else 1
    head_size = config.get("head_dim", width // num_heads)
    query_rows = num_heads * head_size
    kv_rows = config.get("num_key_value_heads", num_heads) * head_size
    norms_whole = architecture.norms_whole
    expert_width = config.get("moe_intermediate_size", mlp_width)
    num_experts = config.get(architecture.expert_count, 0)
    shared_width = config.get("shared_expert_intermediate_size", config.get("shared_intermediate_size", 0))
    by_part: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "attn_q": (query_rows, width),
        "attn_k": (kv_rows, width),
        "attn_v": (kv_rows, width),
        "attn_qkv": (query_rows + 2 * kv_rows, width),
        "attn_output": (width, query_rows),
        "attn_q_norm": (query_rows if norms_whole else head_size,),
        "attn_k_norm": (kv_rows if norms_whole else head_size,),
        "post_attention_norm": (width,),
        "ffn_norm": (width,),
        "ffn_gate": (mlp_width, width),
        "ffn_up": (2 * mlp_width if architecture.fuses_gate else mlp_width, width),
        "ffn_down": (width, mlp_width),
        "post_ffw_norm": (width,),
        "attn_sinks": (num_heads,),
        "ffn_gate_inp": (num_experts, width),
        "ffn_gate_exps": (num_experts, expert_width, width),
        "ffn_up_exps": (num_experts, expert_width, width),
        "ffn_down_exps": (num_experts, width, expert_width),
        "ffn_gate_inp_shexp": (1, width),
        "ffn_gate_shexp": (shared_width, width),
        "ffn_up_shexp": (shared_width, width),
        "ffn_down_shexp": (width, shared_width),
        "shortconv.conv": (width, config.get("conv_L_cache", 0)),
        "shortconv.in_proj": (3 * width, width),
        "shortconv.out_proj": (width, width),
        **(_latent_shapes(config) if architecture.has_latents else {}),
    }
    if architecture.has_state:
        sizes = StateSizes.read(metadata)
        is_delta = "ssm_d" not in (*architecture.parts, *architecture.hybrid_parts)
        by_part |= delta_net_shapes(sizes, width, query_rows) if is_delta else state_space_shapes(sizes, width)
    groups = [parts for parts in architecture.optional_biases if f"blk.0.{parts[0]}.bias" in file.tensors]
    biased = [*architecture.biases, *(part for parts in groups for part in parts)]
    shapes = {
        _tensor_name(index, part, kind): by_part[part][:-1] or by_part[part] if kind == "bias" else by_part[part]
        for index in range(config["num_hidden_layers"])
        for kind, parts in (
            ("weight", (*architecture.parts, *_more_parts(architecture, config, index))),
            ("bias", biased),
        )
        for part in parts
    }
    if stores_apart(file) and architecture.has_latents:
        for index in range(config["num_hidden_layers"]):
            del shapes[f"blk.{index}.attn_kv_b.weight"]
            shapes |= {f"blk.{index}.{part}.weight": by_part[part] for part in ("attn_k_b", "attn_v_b")}
    if config["model_type"] == "deepseek_v3":
        sparse = range(config["first_k_dense_replace"], config["num_hidden_layers"])
        shapes |= {f"blk.{index}.exp_probs_b.bias": (num_experts,) for index in sparse}
    shapes |= {"token_embd.weight": (vocab_size, width), f"{architecture.final_norm}.weight": (width,)}
    if architecture.has_positions:
        shapes["position_embd.weight"] = (config["max_position_embeddings"], width)
    shapes |= {"output_norm.bias": (width,)} if "attn_norm" in biased else {}
    return shapes if config["tie_word_embeddings"] else shapes | {"output.weight": (vocab_size, width)}


def _tensor_name(layer: int, part: str, kind: str) -> str:
    """The name of a part of a layer, which may say its kind itself."""
    return f"blk.{layer}.{part}" + ("" if part.endswith((".bias", "ssm_a", "ssm_d")) else f".{kind}")


def _latent_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parts that only latent attention has, or has otherwise."""
    width, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rotary, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank, inner = config["q_lora_rank"] or width, config["n_shared_experts"] * config["moe_intermediate_size"]
    return {
        "attn_q": (heads * (nope + rotary), width),
        "attn_q_a": (query_rank, width),
        "attn_q_a_norm": (query_rank,),
        "attn_q_b": (heads * (nope + rotary), query_rank),
        "attn_kv_a_mqa": (rank + rotary, width),
        "attn_kv_a_norm": (rank,),
        "attn_kv_b": (heads * (nope + value), rank),
        "attn_k_b": (heads, rank, nope),
        "attn_v_b": (heads, value, rank),
        "attn_output": (width, heads * value),
        "ffn_gate_shexp": (inner, width),
        "ffn_up_shexp": (inner, width),
        "ffn_down_shexp": (width, inner),
    }


def _more_parts(architecture: Architecture, config: dict[str, Any], layer: int) -> tuple[str, ...]:
    """Parts that not every layer has: by the kind of layer, or by the numbers of a model with latent attention."""
    parts: tuple[str, ...] = ()
    if architecture.hybrid_parts:
        attends = config["layer_types"][layer] == FULL
        parts = architecture.attention_parts if attends else architecture.hybrid_parts
    if architecture.hybrid_parts or not architecture.attends:
        has_bias = config.get("mamba_conv_bias", config.get("use_conv_bias"))
        return (*parts, "ssm_conv1d.bias") if has_bias and "ssm_d" in (*architecture.parts, *parts) else parts
    if "kv_lora_rank" not in config:
        return ()
    queries = ("attn_q",) if config["q_lora_rank"] is None else ("attn_q_a", "attn_q_a_norm", "attn_q_b")
    shared = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
    return (*queries, *(MLP if layer < config["first_k_dense_replace"] else (*EXPERTS, *shared)))
