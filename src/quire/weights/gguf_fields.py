"""`add_fields`: the fields of a config.json that one architecture has beside those of Llama.

What a file does not say and llama.cpp takes for granted is written out here. Next to read: `gguf_config.py`.
"""

from collections.abc import Callable
from typing import Any

from quire.errors import ModelFileError
from quire.weights.gguf_architectures import architecture_of
from quire.weights.gguf_file import GGUFFile
from quire.weights.gguf_gemma4 import FULL, SLIDING, gemma4_fields
from quire.weights.gguf_metadata import Metadata
from quire.weights.gguf_recurrent import StateSizes
from quire.weights.gguf_rope import LOG_MULTIPLIER, rotated_share

Config = dict[str, Any]
GEMMA2_WINDOW, GEMMA2_CAPS = 4096, (50.0, 30.0)
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 B parameters, whose scores are scaled by hidden size / heads instead of the head size."""
BIASES = ("attention_bias", "mlp_bias")
NO_POSITIONS_EVERY = 4
"""SmolLM3: files do not say in which layers."""
SIGMOID = 2
"""llama.cpp's number of a score of experts."""


def add_fields(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    """Add to `config`, or replace in it, what the architecture needs. Raises: ModelFileError, UnsupportedModelError."""
    FIELDS[metadata.architecture](file, metadata, config)
    if metadata.value("expert_count", 0):
        architecture = architecture_of(metadata.values)
        config |= {
            architecture.expert_count: metadata.integer("expert_count"),
            architecture.expert_used_count: metadata.integer("expert_used_count"),
        }


def _window(metadata: Metadata) -> int | None:
    has_window = metadata.values.get(metadata.key("attention.sliding_window"), 0) != 0
    return metadata.integer("attention.sliding_window") if has_window else None


def _layer_types(metadata: Metadata, default_period: int, num_layers: int) -> list[str]:
    pattern = metadata.pattern("attention.sliding_window_pattern", default_period, num_layers)
    return [SLIDING if is_sliding else FULL for is_sliding in pattern]


def _llama(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    window = _window(metadata)
    if architecture_of(metadata.values).has_experts:
        config["sliding_window"] = window
    elif window is not None:
        # Llama with a sliding window is what Mistral is; its converter writes "llama" too.
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _qwen2(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    if config["head_dim"] == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    _qwen3(file, metadata, config)


def _qwen3moe(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    _qwen3(file, metadata, config)
    config |= {"moe_intermediate_size": metadata.integer("expert_feed_forward_length"), "norm_topk_prob": True}


def _olmoe(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    config["norm_topk_prob"] = False


def _gpt_oss(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    config |= {
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "sliding_window": _window(metadata),
    }
    if config["rope_scaling"] is not None:
        # As published; files do not say.
        config["rope_scaling"]["truncate"] = False


def _qwen3(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    window = _window(metadata)
    config |= {"use_sliding_window": window is not None, "sliding_window": window}
    if window is not None:
        config["max_window_layers"] = 0


def _phi3(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    config |= {
        "partial_rotary_factor": rotated_share(metadata, config["head_dim"]),
        "sliding_window": _window(metadata),
    }


def _smollm3(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    config["no_rope_layer_interval"] = NO_POSITIONS_EVERY


def _olmo2(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    window = _window(metadata)
    if window is None:
        return
    # OLMo 3 is OLMo 2 with windows to llama.cpp.
    theta = config["rope_theta"]
    config |= {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(metadata, 4, config["num_hidden_layers"]),
        "rope_parameters": {
            FULL: {"rope_theta": theta, **(config["rope_scaling"] or {"rope_type": "default"})},
            SLIDING: {"rope_theta": metadata.number("rope.freq_base_swa", theta), "rope_type": "default"},
        },
        "rope_scaling": None,
    }


def _granite(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    config |= {
        "attention_multiplier": metadata.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _gemma(metadata: Metadata, config: Config) -> None:
    is_largest = config["num_hidden_layers"] == LARGEST_GEMMAS[metadata.architecture]
    by_heads = config["hidden_size"] // config["num_attention_heads"]
    del config["hidden_act"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": by_heads if is_largest else config["head_dim"],
    }


def _gemma2(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    _gemma(metadata, config)
    scores, logits = GEMMA2_CAPS
    config |= {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", scores),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", logits),
        "sliding_window": metadata.integer("attention.sliding_window", GEMMA2_WINDOW),
        "layer_types": _layer_types(metadata, 2, config["num_hidden_layers"]),
    }


def _gemma3(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    _gemma(metadata, config)
    window, num_layers = _window(metadata), config["num_hidden_layers"]
    config |= {
        "sliding_window": window,
        "layer_types": [FULL] * num_layers if window is None else _layer_types(metadata, 6, num_layers),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
    }
    if metadata.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = metadata.number("final_logit_softcapping")


def _glm4(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    config["partial_rotary_factor"] = rotated_share(metadata, config["head_dim"])


def _starcoder2(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    config["norm_epsilon"] = config.pop("rms_norm_eps")
    config |= {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": "blk.0.attn_q.bias" in file.tensors,
        "sliding_window": _window(metadata),
    }


def _gpt2(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    others = ("num_key_value_heads", "head_dim", "hidden_act", "rope_theta", "rope_scaling", *BIASES)
    for name in others:
        del config[name]
    config |= {"layer_norm_epsilon": config.pop("rms_norm_eps"), "activation_function": "gelu_new"}


def _gptneox(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    for name in ("num_key_value_heads", *BIASES):
        del config[name]
    config |= {
        "hidden_act": "gelu",
        "layer_norm_eps": config.pop("rms_norm_eps"),
        "rotary_emb_base": config.pop("rope_theta"),
        "rotary_pct": rotated_share(metadata, config.pop("head_dim")),
        "use_parallel_residual": metadata.flag("use_parallel_residual", default=True),
    }


def _lfm2(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    counts = metadata.counts("attention.head_count_kv", config["num_hidden_layers"])
    config |= {
        "layer_types": [FULL if count else "conv" for count in counts],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "norm_eps": config.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,  # feed_forward_length is adjusted already
    }


def _mistral3(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    config["sliding_window"] = _window(metadata)
    if metadata.value("attention.temperature_scale", 0.0) == 0:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        return
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    original = metadata.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["rope_scaling"] = {
        **scaling,
        "original_max_position_embeddings": original,
        "llama_4_scaling_beta": metadata.number("attention.temperature_scale"),
    }
    if scaling["rope_type"] == "yarn" and not metadata.has(LOG_MULTIPLIER) and "attention_factor" not in scaling:
        # llama.cpp then divides by the factor that YaRN has.
        config["rope_scaling"]["attention_factor"] = 1.0


def _qwen2moe(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    _qwen2(file, metadata, config)
    config |= {**_experts(metadata), "norm_topk_prob": False}


def _experts(metadata: Metadata) -> Config:
    sizes = ("moe_intermediate_size", ""), ("shared_expert_intermediate_size", "shared_")
    return {name: metadata.integer(f"expert_{kind}feed_forward_length") for name, kind in sizes}


def _mamba2(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    sizes = StateSizes.read(metadata)
    kept = ("architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
    fields = {name: config[name] for name in (*kept, "bos_token_id", "eos_token_id")}
    if sizes.inner_size % config["hidden_size"]:
        raise ModelFileError(
            f"{file.path}: {metadata.key('ssm.inner_size')} is {sizes.inner_size}, no multiple of the width"
        )
    fields |= {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "num_heads": sizes.num_heads,
        "head_dim": sizes.head_size,
        "expand": sizes.inner_size // config["hidden_size"],
        "n_groups": sizes.num_groups,
        "state_size": sizes.state_size,
        "conv_kernel": sizes.num_taps,
        "use_bias": False,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
    }
    config.clear()
    config |= fields


def _granitehybrid(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    _granite(file, metadata, config)
    sizes, has_experts = StateSizes.read(metadata), metadata.value("expert_count", 0) != 0
    counts = metadata.counts("attention.head_count_kv", config["num_hidden_layers"])
    shared = "expert_shared_feed_forward_length" if has_experts else "feed_forward_length"
    config |= {
        "layer_types": [FULL if count else "mamba" for count in counts],
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", default=True) else "nope",
        "shared_intermediate_size": metadata.integer(shared),
        "num_local_experts": 0,
        "num_experts_per_tok": metadata.value("expert_used_count", 0),
        "mamba_n_heads": sizes.num_heads,
        "mamba_expand": sizes.inner_size // config["hidden_size"],
        "mamba_d_head": sizes.head_size,
        "mamba_n_groups": sizes.num_groups,
        "mamba_d_state": sizes.state_size,
        "mamba_d_conv": sizes.num_taps,
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "mamba_proj_bias": False,
    }


def _delta_net(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    sizes, num_layers = StateSizes.read(metadata), config["num_hidden_layers"]
    num_blocks = metadata.integer("block_count")
    interval = metadata.integer("full_attention_interval", 4)
    flags = metadata.pattern("attention.recurrent_layers", interval, num_blocks)[:num_layers]
    config |= {
        "partial_rotary_factor": rotated_share(metadata, config["head_dim"]),
        "layer_types": ["linear_attention" if is_recurrent else FULL for is_recurrent in flags],
        "linear_num_key_heads": sizes.num_groups,
        "linear_num_value_heads": sizes.num_heads,
        "linear_key_head_dim": sizes.state_size,
        "linear_value_head_dim": sizes.head_size,
        "linear_conv_kernel_dim": sizes.num_taps,
    }
    if architecture_of(metadata.values).has_experts:
        config |= {**_experts(metadata), "norm_topk_prob": True}


def stores_apart(file: GGUFFile) -> bool:
    """Return whether the projections of latents to keys and to values are two tensors (llama.cpp since 2025)."""
    return "blk.0.attn_k_b.weight" in file.tensors


def _deepseek2(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    head_size, rotary = config.pop("head_dim"), metadata.integer("rope.dimension_count")
    value_size = metadata.integer("attention.value_length")
    if stores_apart(file):
        # key_length and value_length then are those of the cache, which has one head.
        head_size, value_size = (metadata.integer(f"attention.{name}_length_mla") for name in ("key", "value"))
        config["num_key_value_heads"] = config["num_attention_heads"]
    has_rank = metadata.values.get(metadata.key("attention.q_lora_rank"), 0) != 0
    config |= {
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.integer("attention.q_lora_rank") if has_rank else None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": head_size - rotary,
        "v_head_dim": value_size,
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "first_k_dense_replace": metadata.value("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", default=False),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }
    if metadata.integer("expert_gating_func", 1) == SIGMOID:
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    else:
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    if (scaling := config["rope_scaling"]) is not None and "mscale_all_dim" in scaling:
        # Files have a tenth of it, and the same mscale in all published models.
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * scaling["mscale_all_dim"], 6))


FIELDS: dict[str, Callable[[GGUFFile, Metadata, Config], None]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "phi3": _phi3, "smollm3": _smollm3, "olmo2": _olmo2,
    "granite": _granite, "gemma2": _gemma2, "gemma3": _gemma3, "gemma4": gemma4_fields, "glm4": _glm4,
    "starcoder2": _starcoder2, "gpt2": _gpt2, "gptneox": _gptneox,
    "mistral3": _mistral3, "qwen3moe": _qwen3moe, "olmoe": _olmoe, "gpt-oss": _gpt_oss, "deepseek2": _deepseek2,
    "lfm2": _lfm2, "qwen2moe": _qwen2moe, "mamba2": _mamba2, "granitehybrid": _granitehybrid,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _delta_net),
}  # fmt: skip
"""By GGUF's name of the architecture."""
