"""The `config.json` of released models, in the spelling of transformers 4, with all their fields."""

from typing import Any

import pytest

from quire.models.registry import ModelRegistry

COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02,
    "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.50.0",
}  # fmt: skip
SILU = {**COMMON, "hidden_act": "silu", "attention_bias": False}
GEMMA4 = {
    **COMMON, "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "attention_bias": False,
    "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "max_position_embeddings": 131072,
    "num_global_key_value_heads": None, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "Phi-4-mini-instruct": (3.84, {
        **SILU, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "auto_map": {}, "embd_pdrop": 0.0,
        "full_attn_mod": 1, "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
    }),
    "Phi-3-mini-4k-instruct": (3.82, {
        **SILU, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "embd_pdrop": 0.0, "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
        "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064,
    }),
    "SmolLM3-3B": (3.08, {
        **SILU, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
        "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
        "use_sliding_window": False, "vocab_size": 128256,
    }),
    "Qwen3-30B-A3B": (30.53, {
        **SILU, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    }),
    "Qwen1.5-MoE-A2.7B": (14.32, {
        **COMMON, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    }),
    "OLMoE-1B-7B-0924": (6.92, {
        **SILU, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "clip_qkv": None, "hidden_size": 2048,
        "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304,
    }),
    "Mixtral-8x7B-Instruct-v0.1": (46.70, {
        **COMMON, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    }),
    "gpt-oss-20b": (20.91, {
        **SILU, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    }),
    "OLMo-2-1124-7B": (7.30, {
        **SILU, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
    }),
    "Olmo-3-7B": (7.30, {
        **SILU, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 4096,
        "intermediate_size": 11008, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500000, "sliding_window": 4096,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "tie_word_embeddings": False, "vocab_size": 100278,
    }),
    "granite-3.3-8b-instruct": (8.17, {
        **SILU, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0, "hidden_size": 4096, "intermediate_size": 12800, "logits_scaling": 16.0,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 10000000.0, "tie_word_embeddings": True, "vocab_size": 49159,
    }),
    "gemma-2-9b-it": (9.24, {
        **COMMON, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584, "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": None, "vocab_size": 256000,
    }),
    "gemma-3-1b-it": (1.00, {
        **COMMON, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    }),
    "gemma-3-4b-it": (3.88, {
        **COMMON, "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144, "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
    }),
    "GLM-4-9B-0414": (9.40, {
        **SILU, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552,
    }),
    "GLM-4.5-Air": (106.85, {
        **SILU, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
        "use_qk_norm": False, "vocab_size": 151552,
    }),
    "starcoder2-3b": (3.03, {
        **COMMON, "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "embedding_dropout": 0.1,
        "activation_function": "gelu", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072,
        "intermediate_size": 12288, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 16384,
        "mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm", "num_attention_heads": 24,
        "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
        "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
    }),
    "Devstral-2-123B-Instruct-2512": (125.0, {
        **COMMON, "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 12288, "intermediate_size": 28672, "max_position_embeddings": 262144,
        "num_attention_heads": 96, "num_hidden_layers": 88, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 4.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 0.0,
            "original_max_position_embeddings": 4096, "llama_4_scaling_beta": 0.0, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072,
    }),
    "DeepSeek-V2-Lite": (15.71, {
        **SILU, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "auto_map": {},
        "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        "vocab_size": 102400,
    }),
    "DeepSeek-R1": (671.03, {
        **SILU, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "auto_map": {},
        "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    }),
    "Qwen3-Next-80B-A3B-Instruct": (79.67, {
        **SILU, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "decoder_sparse_step": 1,
        "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
        "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    }),
    "LFM2-1.2B": (1.17, {
        **COMMON, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True,
        "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
        "block_norm_eps": 1e-5, "block_use_swiglu": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rope_theta": 1000000.0, "use_pos_enc": True, "vocab_size": 65536,
    }),
    "Mamba-Codestral-7B-v0.1": (7.29, {
        **COMMON, "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "chunk_size": 256, "conv_kernel": 4,
        "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096, "layer_norm_epsilon": 1e-5,
        "n_groups": 8, "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64,
        "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
        "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")],
        "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "use_bias": False, "use_conv_bias": True,
        "vocab_size": 32768,
    }),
    "granite-4.0-h-tiny": (6.94, {
        **SILU, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_size": 1536, "init_method": "mup",
        "intermediate_size": 512, "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": True,
        "layer_types": ["attention" if index % 10 == 5 else "mamba" for index in range(40)], "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
        "mamba_proj_bias": False, "max_position_embeddings": 131072, "normalization_function": "rmsnorm",
        "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4,
        "num_local_experts": 64, "output_router_logits": False, "position_embedding_type": "nope",
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000,
        "router_aux_loss_coef": 0.0001, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
        "vocab_size": 100352,
    }),
    "gemma-4-E2B-it": (4.63, {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "audio_config": {},
        "audio_token_id": 258881, "vision_config": {}, "vision_soft_tokens_per_image": 280, "text_config": {
            **GEMMA4, "hidden_size": 1536, "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_attention_heads": 8,
            "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "sliding_window": 512,
            "use_double_wide_mlp": True,
        },
    }),
    "gemma-4-26B-A4B-it": (25.23, {
        **GEMMA4, "attention_k_eq_v": True, "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "moe_intermediate_size": 704,
        "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "sliding_window": 1024, "top_k_experts": 8, "use_bidirectional_attention": "vision",
    }),
    "gemma-4-31B-it": (30.70, {
        **GEMMA4, "attention_k_eq_v": True, "hidden_size": 5376, "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "num_attention_heads": 32,
        "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16, "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    }),
}  # fmt: skip
"""By name: billions of parameters of the language model, and the fields."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_is_read_and_makes_a_model_of_the_published_size(name: str) -> None:
    billions, fields = PUBLISHED[name]
    config = ModelRegistry.make_model_config(fields)
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    default = 2**20 if fields["model_type"] == "mamba2" else 131072
    assert config.context_len == fields.get("max_position_embeddings", default)
