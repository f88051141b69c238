"""`describe_config`, `name_tensors`: a Hugging Face model under the keys and tensor names of GGUF.

The opposite of `gguf_config.py` and `checkpoint.py`, for decoders whose config these keys say completely; the caller
reads the keys back and compares. Sources: llama.cpp's converter. Next to read: `gguf_layout.py`, `quantize_source.py`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError
from quire.weight_map import Layout
from quire.weights.gguf_architectures import ARCHITECTURES, GRANITE4_DENSE, MIXTRAL, Architecture
from quire.weights.gguf_export_keys import architecture_keys, state_sizes
from quire.weights.gguf_gemma4 import FULL, rotary_divisors
from quire.weights.gguf_layout import as_file, file_views, undone
from quire.weights.gguf_names import (
    BARE_PARTS,
    BIASES,
    LAYER_PARTS,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    TOP_PARTS,
    huggingface_name,
)
from quire.weights.gguf_rope import LOG_MULTIPLIER, llama3_factors
from quire.weights.weight_tensor import WeightTensor

SAME_FILES = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2", "deepseek_v3": "deepseek2"}
"""Model types that llama.cpp stores as another architecture."""
STACKED_HEADS = {"attn_k_b": "self_attn.k_b_proj.*", "attn_v_b": "self_attn.v_b_proj.*"}
"""Parts that `gguf_layout.py` makes: a matrix for each head."""
NUMBERS = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon", "vocab_size": "vocab_size",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count", "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}  # fmt: skip
"""Fields of config.json that are one key."""
YARN = {
    "original_max_position_embeddings": "original_context_length", "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}  # fmt: skip

MINISTRAL = {"llama_4_scaling_beta": "attention.temperature_scale", "mscale_all_dim": LOG_MULTIPLIER}


def architecture_for(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """GGUF's name of a model, and what it stores. Raises: UnsupportedModelError."""
    model_type = str(config.get("model_type"))
    name = SAME_FILES.get(model_type) or next(
        (name for name, found in ARCHITECTURES.items() if found.model_type == model_type), None
    )
    if name is None:
        raise UnsupportedModelError(
            f"model_type '{model_type}' is not written to GGUF here; if llama.cpp's convert_hf_to_gguf.py knows the "
            "model, convert it there, then quantise the result"
        )
    is_dense = not config.get("num_local_experts", 8) and config.get("position_embedding_type") == "rope"
    if name == "granitehybrid" and is_dense and not {"mamba"} & {*config.get("layer_types", ("mamba",))}:
        return "granite", GRANITE4_DENSE
    return name, MIXTRAL if model_type == "mixtral" else ARCHITECTURES[name]


def completed(config: Mapping[str, Any], read: Any) -> dict[str, Any]:
    """Return the config with defaults of its model, and with Llama's names of sizes. `read`: the model's `Config`."""
    _, architecture = architecture_for(config)
    attributes = {
        "tie_word_embeddings": "tie_word_embeddings", "num_key_value_heads": "num_kv_heads", "head_dim": "head_size",
        "rms_norm_eps": "rms_norm_epsilon", "max_position_embeddings": "context_len", "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "vocab_size": "vocab_size",
        "intermediate_size": "intermediate_size",
    }  # fmt: skip
    if architecture.epsilon_key == "attention.layer_norm_epsilon":
        attributes["norm_epsilon"] = attributes.pop("rms_norm_eps")
    known = {name: getattr(read, attribute) for name, attribute in attributes.items() if hasattr(read, attribute)}
    if (rope := getattr(read, "rope", None)) is not None:
        known |= {"rope_theta": rope.theta, "partial_rotary_factor": rope.rotated_share}
    return {**known, **config}


def describe_config(config: Mapping[str, Any], read: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the keys that say what the config says, and tensors of divisors of the rotary frequencies.

    `config`: with the model's defaults, see `completed`; `read`: the model's `Config`.
    Shapes: float32 `[D / 2]`. Raises: UnsupportedModelError; ModelFileError for missing sizes.
    """
    name, architecture = architecture_for(config)
    try:
        head_size = _head_size(config) if architecture.attends else 0
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        rope = rope.get(FULL) or rope
        theta = float({"rope_theta": 10000.0, **config, **rope}["rope_theta"])
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelFileError(f"config.json: {error} is missing or wrong") from error
    keys: dict[str, Any] = {}
    for field, key in NUMBERS.items():
        value = config.get(field)
        is_off = field == "sliding_window" and config.get("use_sliding_window") is False
        if isinstance(value, int | float) and not isinstance(value, bool) and not is_off:
            is_number = "epsilon" in key or "scal" in key or "softcap" in key or "freq" in key
            keys[key] = float(value) if is_number else value
    if architecture is MIXTRAL:
        keys.setdefault("expert_count", 8)
    rotated = head_size * (config.get("partial_rotary_factor") or 1)
    if architecture.attends:
        keys |= {
            "attention.key_length": head_size,
            "attention.value_length": head_size,
            "rope.dimension_count": int(rotated),
            "rope.freq_base": theta,
        }
    factors, kind = {}, rope.get("rope_type", rope.get("type", "default"))
    if architecture.has_layer_sizes:
        kind, factors = "default", {ROPE_FACTORS: rotary_divisors(read.rope.rotated_share, read.full_head_size)}
    if kind in ("linear", "yarn"):
        _check_attention_factor(rope)
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        keys |= {
            f"rope.scaling.{key}": int(rope[field]) if key.endswith("length") else float(rope[field])
            for field, key in YARN.items()
            if kind == "yarn" and rope.get(field) is not None
        }
        keys |= {key: float(rope[field]) for field, key in MINISTRAL.items() if rope.get(field)}
    elif kind == "llama3":
        factors = {ROPE_FACTORS: llama3_factors(float(rope["factor"]), head_size=head_size, theta=theta)}
    elif kind == "longrope":
        factors = {LONG_FACTORS: np.array(read.rope.long_factors), SHORT_FACTORS: np.array(read.rope.short_factors)}
        keys["rope.scaling.original_context_length"] = int(read.rope.original_context_len)
        keys["rope.scaling.attn_factor"] = float(read.rope.attention_factor)
    elif kind != "default":
        raise UnsupportedModelError(f"rotary scaling '{kind}' is not written to GGUF here; use llama.cpp's converter")
    keys |= architecture_keys(name, config, read)
    stored = {f"{name}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": name, **stored}, {key: each.astype(np.float32) for key, each in factors.items()}


def _check_attention_factor(rope: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a factor that YaRN does not have by itself: llama.cpp would multiply both."""
    given = rope.get("attention_factor")
    if given is not None and abs(given - (0.1 * math.log(rope["factor"]) + 1)) > 1e-6:
        raise UnsupportedModelError(
            f"rotary scaling with attention_factor={given} is not written to GGUF here: llama.cpp would compute another"
        )


def name_tensors(
    config: Mapping[str, Any], read: Any, tensors: Mapping[str, WeightTensor], layout: Layout
) -> dict[str, tuple[str | None, list[WeightTensor]]]:
    """The stored tensors by GGUF name: the Hugging Face name of a single one, and the matrices, several for experts.

    `layout`: the model's. Raises: UnsupportedModelError for a tensor that has no GGUF name.
    """
    _, architecture = architecture_for(config)
    names = {**architecture.names, **(STACKED_HEADS if architecture.has_latents else {})}
    own = {name: tensors[stored] for name, stored in layout.used_names(tensors).items()}
    own = as_file(own, architecture, read, state_sizes(read))
    if config.get("tie_word_embeddings"):
        own.pop("lm_head.weight", None)
    found: dict[str, tuple[str | None, list[WeightTensor]]] = {}
    used: set[str] = set()
    for name in _file_names(config, names):
        hf_name = huggingface_name(name, names)
        if hf_name is None:
            continue
        own_name = layout.own_name(hf_name)
        parts = [own_name.replace("*", str(index)) for index in range(_count(own_name, own))]
        if not parts or used.intersection(parts) or not all(part in own for part in parts):
            continue
        used |= set(parts)
        stored = [own[part] for part in parts]
        views = undone(file_views(name, math.prod(stored[0].shape[:1]), architecture, config))
        found[name] = (None if "*" in hf_name else stored[0].name, [each.viewed(views) for each in stored])
    if left := [name for name in own if name not in used]:
        raise UnsupportedModelError(f"tensor {own[left[0]].name} has no GGUF name here; use llama.cpp's converter")
    return found


def _file_names(config: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[str]:
    """Yield the names that a file may have, those of a shared expert before those of an MLP of the same name."""
    for part in (*TOP_PARTS, "token_embd_norm"):
        yield from (f"{part}.weight", f"{part}.bias")
    has_experts = bool(config.get("num_local_experts"))
    by_layer = {**LAYER_PARTS, **names}
    shared = [part for part in by_layer if part.endswith("_shexp")]
    twice = [part for part in shared if names.get(part.removesuffix("_shexp")) == by_layer[part]]
    parts = [*shared, *(part for part in by_layer if part not in shared)]
    for layer in range(config["num_hidden_layers"]):
        for part in parts if has_experts else (part for part in parts if part not in twice):
            kinds = () if part in BARE_PARTS else ("bias",) if part in BIASES else ("weight", "bias")
            yield from (f"blk.{layer}.{part}.{kind}" for kind in kinds)
            if not kinds:
                yield f"blk.{layer}.{part}"


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _count(hf_name: str, tensors: Mapping[str, WeightTensor]) -> int:
    if "*" not in hf_name:
        return 1
    return next(index for index in range(len(tensors) + 1) if hf_name.replace("*", str(index)) not in tensors)
