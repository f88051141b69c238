"""Small Hugging Face configs of every model type: what `test_conformance.py` compares with Transformers.

A new file `models/<model_type>.py` needs an entry here; without one the conformance test fails and says so.
"""

import importlib
from typing import Any

BASE = {
    "vocab_size": 53,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
LLAMA = {**BASE, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN = {**LLAMA, "tie_word_embeddings": True}
QWEN3_MOE = {**LLAMA, "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2_MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32,
}  # fmt: skip
DELTA_NET = {
    **LLAMA, "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
LFM2 = {name: value for name, value in LLAMA.items() if name not in ("rms_norm_eps", "hidden_act")}
MAMBA2 = {
    "vocab_size": 53, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 12, "n_groups": 4,
    "state_size": 16, "chunk_size": 16,
}  # fmt: skip
OLMOE = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24}
OPT = {
    "vocab_size": 53,
    "hidden_size": 48,
    "ffn_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 48,
}
MULTIPLES = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GRANITE4 = {
    **LLAMA,
    **MULTIPLES,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 40,
    "layer_types": ["full_attention"] * 2,
}
GEMMA = {
    **BASE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 9,
    "sliding_window": 5,
}
GEMMA4 = {
    **BASE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "global_head_dim": 20,
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 53,
}  # fmt: skip
GEMMA4_EXPERTS = {
    **GEMMA4,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 20,
}
LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
DEEPSEEK = {
    **BASE, "num_attention_heads": 4, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 20, "first_k_dense_replace": 1,
}  # fmt: skip
GLM4_MOE = {
    **LLAMA, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
DEEPSEEK_YARN = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.9}
STARCODER = {**BASE, "num_attention_heads": 4, "num_key_value_heads": 2}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GPT2 = {"vocab_size": 53, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
NEOX = {**BASE, "num_attention_heads": 4, "rotary_pct": 0.5}

TINY_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "groups of 2": LLAMA,
        "multi-head, tied": {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True},
        "one KV head": {**LLAMA, "num_key_value_heads": 1},
        "groups of 3, odd sizes": {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
        "all biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
        "theta": {**LLAMA, "rope_theta": 500.0},
        "linear rope scaling": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "llama3 rope scaling": {**LLAMA, "rope_theta": 10000.0, "rope_scaling": LLAMA3_ROPE},
        "rope parameters of transformers 5": {**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 700.0}},
        "yarn rope scaling": {**LLAMA, "rope_theta": 10000.0, "rope_scaling": YARN},
    },
    "mistral": {
        "short window": {**LLAMA, "sliding_window": 5},
        "window of one block": {**LLAMA, "sliding_window": 4, "head_dim": 16},
        "no window": {**LLAMA, "sliding_window": None},
        "window of 4096 by default": LLAMA,
    },
    "qwen2": {
        "plain": QWEN,
        "untied, one KV head": {**QWEN, "tie_word_embeddings": False, "num_key_value_heads": 1},
        "window in the upper layer": {
            **QWEN, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
        },
        "layer types": {
            **QWEN,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "window switched off": {**QWEN, "use_sliding_window": False, "sliding_window": 3, "max_window_layers": 1},
    },
    "qwen3": {
        "head size of its own": {**QWEN, "head_dim": 16},
        "biases, untied": {**QWEN, "head_dim": 12, "attention_bias": True, "tie_word_embeddings": False},
        "groups of 4, window": {
            **QWEN,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
    },
    "qwen2_moe": {
        "shared expert": {**LLAMA, **QWEN2_MOE},
        "no biases, one layer dense, odd sizes": {
            **LLAMA, **QWEN2_MOE, "qkv_bias": False, "num_hidden_layers": 3, "mlp_only_layers": [1], "hidden_size": 40,
            "num_key_value_heads": 1, "norm_topk_prob": True, "shared_expert_intermediate_size": 36,
        },
    },
    "qwen3_moe": {
        "two of eight, head size of its own": {
            **QWEN3_MOE, "norm_topk_prob": True, "tie_word_embeddings": True, "head_dim": 16,
        },
        "not renormalised, one layer dense": {
            **QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": [0], "num_experts": 5, "num_experts_per_tok": 3,
        },
        "every other layer sparse, all experts, odd sizes": {
            **QWEN3_MOE, "decoder_sparse_step": 2, "num_experts_per_tok": 8, "moe_intermediate_size": 20,
            "hidden_size": 42, "head_dim": 10, "num_key_value_heads": 1,
        },
    },
    "qwen3_next": {
        "one layer of three attends, a dense layer, groups of 2": {
            **DELTA_NET, **QWEN2_MOE, "num_hidden_layers": 4, "mlp_only_layers": [1], "full_attention_interval": 3,
        },
        "attention first, one key head, odd sizes": {
            **DELTA_NET, **QWEN2_MOE, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 20,
            "num_key_value_heads": 1, "linear_key_head_dim": 10, "linear_conv_kernel_dim": 3,
            "num_attention_heads": 3, "norm_topk_prob": False,
            "hidden_size": 44, "tie_word_embeddings": True, "partial_rotary_factor": 0.5,
        },
    },
    "qwen3_5_text": {
        "groups of 2, whole tiles": {**DELTA_NET, "hidden_size": 64, "intermediate_size": 128},
        "multi-head, one key head, odd sizes, states of two groups of columns": {
            **DELTA_NET, "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 1,
            "linear_num_value_heads": 5, "linear_value_head_dim": 84, "hidden_size": 53,
            "num_attention_heads": 3, "num_key_value_heads": 3, "attention_bias": True, "tie_word_embeddings": True,
            "rope_parameters": {**MROPE, "rope_theta": 700.0, "partial_rotary_factor": 0.5},
        },
    },
    "qwen3_5_moe_text": {
        "two of six, interval of 2": {
            **{name: value for name, value in DELTA_NET.items() if name != "intermediate_size"}, **QWEN2_MOE,
            "full_attention_interval": 2,
        },
    },
    "qwen3_5": {
        "language model of a whole": {
            "text_config": {**DELTA_NET, "model_type": "qwen3_5_text", "full_attention_interval": 2},
            "vision_config": QWEN_VISION, "tie_word_embeddings": True,
        },
    },
    "qwen3_5_moe": {
        "language model of a whole": {
            "text_config": {**DELTA_NET, **QWEN2_MOE, "model_type": "qwen3_5_moe_text", "full_attention_interval": 2},
            "vision_config": QWEN_VISION,
        },
    },
    "lfm2": {
        "convolutions around attention": {
            **LFM2, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 8,
        },
        "biases, no adjusted width, odd sizes": {
            **LFM2, "full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False,
            "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 42, "tie_word_embeddings": False,
        },
    },
    "mamba2": {
        "groups of 2": MAMBA2,
        "one group, biases, tied, odd sizes": {
            **MAMBA2, "hidden_size": 35, "num_heads": 5, "head_dim": 14, "n_groups": 1, "state_size": 10,
            "conv_kernel": 3, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True,
        },
    },
    "olmoe": {
        "two of eight": {**LLAMA, "pad_token_id": None, **OLMOE},
        "renormalised, one KV head, odd sizes": {
            **LLAMA, "pad_token_id": None, **OLMOE, "norm_topk_prob": True, "num_attention_heads": 3, "hidden_size": 42,
            "num_key_value_heads": 1, "num_experts": 5, "num_experts_per_tok": 4, "intermediate_size": 30,
        },
    },
    "mixtral": {
        "two of four": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        "window, one of four": {
            **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 6, "head_dim": 16,
        },
    },
    "gpt_oss": {
        "two of four, yarn": {
            **LLAMA, "head_dim": 12, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_theta": 10000.0, "rope_scaling": {**YARN, "truncate": False},
        },
        "no biases of attention, one KV head, odd sizes": {
            **LLAMA, "head_dim": 10, "hidden_size": 42, "num_key_value_heads": 1, "attention_bias": False,
            "num_local_experts": 3, "num_experts_per_tok": 1, "rope_parameters": {"rope_theta": 700.0},
            "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9, "intermediate_size": 20,
        },
    },
    "phi3": {
        "groups of 2": {**LLAMA, "pad_token_id": None},
        "part of each head, window, one KV head, tied": {
            **LLAMA, "pad_token_id": None, "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "hidden_size": 64,
            "sliding_window": 7, "tie_word_embeddings": True,
        },
        "short factors": {
            **LLAMA, "pad_token_id": None, "partial_rotary_factor": 0.67, "original_max_position_embeddings": 128,
            "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 128, **LONGROPE},
        },
        "long factors": {
            **LLAMA, "pad_token_id": None, "partial_rotary_factor": 0.67, "original_max_position_embeddings": 1,
            "rope_scaling": {
                "type": "longrope", "original_max_position_embeddings": 1, "attention_factor": 1.2, **LONGROPE,
            },
        },
    },
    "smollm3": {
        "one layer of four without positions": {**LLAMA, "num_hidden_layers": 4, "pad_token_id": None},
        "layers listed, window, odd sizes": {
            **LLAMA, "pad_token_id": None, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 10,
            "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": False,
        },
    },
    "olmo2": {
        "groups of 2": LLAMA,
        "one KV head, biases, tied": {
            **LLAMA, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True,
        },
        "three heads, odd sizes": {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 42},
    },
    "olmo3": {
        "scaled where there is no window": {
            **LLAMA, "num_hidden_layers": 4, "sliding_window": 6, "rope_theta": 500000.0,
            "rope_scaling": {**YARN, "attention_factor": 1.2},
        },
        "layer types, rope parameters of transformers 5": {
            **LLAMA, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    },
    "granite": {
        "multiples": {**LLAMA, **MULTIPLES},
        "one KV head, biases, tied": {
            **LLAMA, **MULTIPLES, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        "no multiples": {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 3},
    },
    "granitemoehybrid": {
        "with positions": {**GRANITE4, "position_embedding_type": "rope"},
        "without positions, one KV head, tied": {
            **GRANITE4, "shared_intermediate_size": 36, "num_key_value_heads": 1, "tie_word_embeddings": True,
        },
        "state spaces with one wide head and experts beside attention": {
            **GRANITE4, "mamba_n_heads": 1, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
        },
        "state spaces alone, groups of 2, odd sizes": {
            **GRANITE4, "hidden_size": 45, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16,
            "layer_types": ["mamba", "mamba"], "mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_proj_bias": True,
            "mamba_d_conv": 3,
        },
    },
    "gemma2": {
        "window in the lower layer": GEMMA,
        "one KV head, untied, odd sizes": {
            **GEMMA, "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": False, "num_hidden_layers": 3,
        },
        "no caps, no window, biases": {
            **GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
            "layer_types": ["full_attention"] * 2,
        },
        "strong caps": {**GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0},
    },
    "gemma3_text": {
        "two bases": {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3, "rope_theta": 5000.0},
        "linear scaling, logits capped, one KV head": {
            **GEMMA, "num_key_value_heads": 1, "final_logit_softcapping": 5.0, "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2,
        },
    },
    "gemma3": {
        "language model of a model with images": {
            "text_config": {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4,
        },
    },
    "gemma4_text": {
        "keys of earlier layers, inputs of each layer, odd sizes": {
            **GEMMA4, "num_hidden_layers": 5, "layer_types": ["sliding_attention", *GEMMA4["layer_types"]],
            "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
        },
        "experts, values that are keys, one KV head": GEMMA4_EXPERTS,
        "angles given, biases, untied, one layer of own keys of each kind": {
            **GEMMA4, "num_hidden_layers": 5, "layer_types": ["full_attention", *["sliding_attention"] * 4],
            "num_kv_shared_layers": 3, "attention_bias": True, "tie_word_embeddings": False,
            "num_key_value_heads": 4, "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
                "full_attention": {
                    "rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5, "rope_theta": 5000.0,
                },
            },
        },
        "sizes by layer": {
            **GEMMA4, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3,
            "per_layer_config": {"2": {"head_dim": 16, "num_key_value_heads": 1}}, "hidden_size_per_layer_input": 0,
        },
    },
    "gemma4": {
        "language model of a model with images": {
            "text_config": {**GEMMA4, "num_kv_shared_layers": 1},
            "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8},
        },
    },
    "mistral3": {
        "language model of a model with images": {
            "text_config": {**LLAMA, "model_type": "ministral3", "head_dim": 12, "rope_parameters": MINISTRAL_ROPE},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}, "tie_word_embeddings": False,
        },
    },
    "glm4": {
        "neighbouring pairs": {**LLAMA, "head_dim": 16, "pad_token_id": None},
        "a quarter of each head, one KV head, no biases": {
            **LLAMA, "head_dim": 16, "pad_token_id": None, "num_key_value_heads": 1, "partial_rotary_factor": 0.25,
            "attention_bias": False, "tie_word_embeddings": True,
        },
        "whole heads, odd sizes": {
            **LLAMA, "head_dim": 10, "pad_token_id": None, "num_attention_heads": 6, "partial_rotary_factor": 1.0,
        },
    },
    "glm4_moe": {
        "norms of heads, three of eight, a dense layer": {
            **GLM4_MOE, "use_qk_norm": True, "num_hidden_layers": 3, "routed_scaling_factor": 2.5,
        },
        "biases, two of four groups, two shared, tied": {
            **GLM4_MOE, "attention_bias": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
            "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        "not normalised, a quarter rotated, odd sizes, no dense layer": {
            **GLM4_MOE, "num_attention_heads": 6, "head_dim": 24, "partial_rotary_factor": 0.25,
            "norm_topk_prob": False, "first_k_dense_replace": 0, "moe_intermediate_size": 18,
        },
    },
    "deepseek_v2": {
        "greedy, yarn": {**DEEPSEEK, "rope_scaling": DEEPSEEK_YARN, "topk_method": "greedy"},
        "two of four groups, query latent, biases, always absorbed": {
            **DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 20,
            "routed_scaling_factor": 4.0, "attention_bias": True, "kv_lora_rank": 16, "qk_nope_head_dim": 20,
            "v_head_dim": 16, "num_hidden_layers": 3, "n_shared_experts": 1, "tie_word_embeddings": True,
        },
        "three heads, odd sizes, no dense layer": {
            **DEEPSEEK, "num_attention_heads": 3, "hidden_size": 42, "kv_lora_rank": 22, "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6, "v_head_dim": 9, "first_k_dense_replace": 0,
        },
    },
    "deepseek_v3": {
        "sigmoid, two of four groups, yarn": {
            **DEEPSEEK, "num_key_value_heads": 4, "q_lora_rank": 20, "n_group": 4, "topk_group": 2,
            "n_shared_experts": 1, "rope_scaling": DEEPSEEK_YARN,
        },
        "one group, halves rotated, not normalised, always absorbed": {
            **DEEPSEEK, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
            "rope_interleave": False, "routed_scaling_factor": 1.5, "kv_lora_rank": 16,
            "qk_nope_head_dim": 16, "v_head_dim": 16,
        },
    },
    "starcoder2": {
        "biases, window": {**STARCODER, "sliding_window": 6},
        "one KV head, no biases, untied, relu": {
            **STARCODER, "num_key_value_heads": 1, "use_bias": False, "tie_word_embeddings": False,
            "hidden_act": "relu",
        },
    },
    "ministral3": {
        "queries grow": {**LLAMA, "head_dim": 12, "pad_token_id": None, "rope_parameters": MINISTRAL_ROPE},
        "window, one KV head, tied, odd sizes": {
            **LLAMA, "head_dim": 10, "pad_token_id": None, "num_key_value_heads": 1, "sliding_window": 7,
            "tie_word_embeddings": True,
            "rope_parameters": {**MINISTRAL_ROPE, "llama_4_scaling_beta": 0.8, "mscale_all_dim": 0.5},
        },
    },
    "opt": {
        "norm before": OPT,
        "norm after, narrow embeddings": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
        "gelu, untied": {**OPT, "activation_function": "gelu", "tie_word_embeddings": False},
        "no biases": {**OPT, "enable_bias": False},
        "norms without weights": {**OPT, "layer_norm_elementwise_affine": False},
        "no final norm": {**OPT, "_remove_final_layer_norm": True},
    },
    "gpt2": {
        "scores by layer": {**GPT2, "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
        "three heads": {**GPT2, "n_head": 3},
        "untied, relu, inner size": {
            **GPT2, "tie_word_embeddings": False, "activation_function": "relu", "n_inner": 40,
        },
    },
    "gpt_neox": {
        "side by side": NEOX,
        "one after the other, three heads": {
            **NEOX, "use_parallel_residual": False, "num_attention_heads": 3, "rotary_pct": 0.25,
        },
        "no biases, tied, tanh": {
            **NEOX, "attention_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu_new", "rotary_pct": 1.0,
        },
        "rope parameters of transformers 5": {
            **BASE, "num_attention_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        },
    },
}  # fmt: skip


def full_config(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as a `config.json` has them."""
    (architecture,) = importlib.import_module(f"quire.models.{model_type}").ARCHITECTURES
    return {"model_type": model_type, "architectures": [architecture], **fields}
