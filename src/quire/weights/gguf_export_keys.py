"""`architecture_keys`: the keys of one architecture that `gguf_export.describe_config` does not make of all configs.

The opposite of `gguf_fields.py`. `read` is the model's `Config`. Next to read: `gguf_export.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from quire.weights.gguf_fields import SIGMOID
from quire.weights.gguf_gemma4 import gemma4_keys
from quire.weights.gguf_recurrent import StateSizes
from quire.weights.gguf_rope import LOG_MULTIPLIER

Keys = dict[str, Any]


def architecture_keys(name: str, config: Mapping[str, Any], read: Any) -> Keys:
    """Return the keys, without the architecture's `name` before them; None for one that the file lacks."""
    states = state_sizes(read)
    keys: Keys = {} if states is None else states.keys()
    make = KEYS.get(name)
    return keys if make is None else keys | make(config, read)


def state_sizes(read: Any) -> StateSizes | None:
    """Return the sizes of a model's layers with state; None if it has none, or convolutions alone."""
    if (states := getattr(read, "state_space", None)) is not None:
        inner = states.num_heads * states.head_size
        return StateSizes(states.num_taps, inner, states.state_size, states.num_heads, states.num_groups)
    if hasattr(read, "num_value_heads"):
        inner = read.num_value_heads * read.value_size
        return StateSizes(read.num_taps, inner, read.key_size, read.num_value_heads, read.num_key_heads)
    return None


def _gpt_neox(config: Mapping[str, Any], read: Any) -> Keys:
    return {"use_parallel_residual": read.parallel}


def _olmo(config: Mapping[str, Any], read: Any) -> Keys:
    """Windows make OLMo 2 OLMo 3."""
    pattern = [window is not None for window in read.windows]
    return {"attention.sliding_window_pattern": pattern} if any(pattern) else {}


def _gpt_oss(config: Mapping[str, Any], read: Any) -> Keys:
    return {"expert_feed_forward_length": read.intermediate_size}


def _deepseek(config: Mapping[str, Any], read: Any) -> Keys:
    """Cached latents are one head; the sizes of heads are those of `…_mla`."""
    scoring = read.scoring
    keys = {
        "attention.head_count_kv": 1,
        "attention.key_length": read.kv_rank + read.rotary_size,
        "attention.value_length": read.kv_rank,
        "attention.key_length_mla": read.nope_size + read.rotary_size,
        "attention.value_length_mla": read.value_size,
        "attention.kv_lora_rank": read.kv_rank,
        "rope.dimension_count": read.rotary_size,
        "expert_count": read.num_experts,
        "expert_feed_forward_length": read.expert_size,
        "expert_shared_count": read.shared_size // read.expert_size,
        "expert_weights_scale": float(scoring.factor),
        "expert_weights_norm": read.renormalise,
        "expert_gating_func": SIGMOID if scoring.is_sigmoid else 1,
        "expert_group_count": scoring.num_groups,
        "expert_group_used_count": scoring.top_groups,
        "leading_dense_block_count": (*read.sparse_layers, True).index(True),
    }
    if read.query_rank is not None:
        keys["attention.q_lora_rank"] = read.query_rank
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return keys | ({LOG_MULTIPLIER: 0.1 * scaling["mscale_all_dim"]} if scaling.get("mscale_all_dim") else {})


def _kv_heads(read: Any) -> list[int]:
    return [0 if read.is_recurrent(index) else read.num_kv_heads for index in range(read.num_layers)]


def _lfm2(config: Mapping[str, Any], read: Any) -> Keys:
    return {
        "attention.head_count_kv": _kv_heads(read),
        "feed_forward_length": read.intermediate_size,
        "shortconv.l_cache": read.num_taps,
    }


def _mamba2(config: Mapping[str, Any], read: Any) -> Keys:
    epsilon = read.state_space.epsilon
    sizes = {"context_length": read.context_len, "feed_forward_length": 0, "attention.head_count": 0}
    return sizes | {"attention.head_count_kv": None, "attention.layer_norm_rms_epsilon": float(epsilon)}


def _granite4(config: Mapping[str, Any], read: Any) -> Keys:
    return {
        "expert_count": read.num_experts,
        "expert_used_count": read.top_k if read.num_experts else 0,
        "expert_shared_feed_forward_length": read.intermediate_size,
        "attention.head_count_kv": _kv_heads(read),
        "feed_forward_length": read.expert_size if read.num_experts else read.intermediate_size,
        "rope.scaling.finetuned": read.rotates,
    }


def _granite(config: Mapping[str, Any], read: Any) -> Keys:
    return {"feed_forward_length": read.intermediate_size}


def _delta_net(config: Mapping[str, Any], read: Any) -> Keys:
    """Every n-th layer attends; the caller finds other patterns when it reads the keys back.

    Sections divide the rotated pairs among the axes of images; llama.cpp needs some for text, too.
    """
    first = read.recurrent_layers.index(False) if False in read.recurrent_layers else read.num_layers
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    num_pairs = read.rope.rotated_size(read.head_size) // 2
    thirds = [(num_pairs + more) // 3 for more in (2, 1, 0)]
    sections = [*rope.get("mrope_section", thirds), 0]
    return {"full_attention_interval": first + 1, "rope.dimension_sections": sections}


def _qwen3_next(config: Mapping[str, Any], read: Any) -> Keys:
    keys = _delta_net(config, read)
    del keys["rope.dimension_sections"]
    return keys


KEYS: dict[str, Callable[[Mapping[str, Any], Any], Keys]] = {
    "olmo2": _olmo, "gptneox": _gpt_neox, "gpt-oss": _gpt_oss, "deepseek2": _deepseek, "lfm2": _lfm2,
    "mamba2": _mamba2, "granite": _granite, "granitehybrid": _granite4, "qwen3next": _qwen3_next, "qwen35": _delta_net,
    "qwen35moe": _delta_net, "gemma4": gemma4_keys,
}  # fmt: skip
"""By GGUF's name of the architecture."""
