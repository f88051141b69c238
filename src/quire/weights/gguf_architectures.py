"""`ARCHITECTURES`: how the GGUF architectures name their tensors, and as which Hugging Face models they are run.

Sources of the names and keys: the tables of the gguf package. Next to read: `gguf_config.py`, which adds the fields.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from quire.weights.gguf_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

NORMS_AROUND = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SECOND_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""Of architectures that do not call it `ffn_norm`."""
SHARED_EXPERT = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}


@dataclass(frozen=True)
class Architecture:
    """Names and values of one architecture. The model itself knows which tensors it has, and their shapes.

    Fields:
        hf_class, model_type: of the Hugging Face config.
        names: parts whose Hugging Face names are not those of `gguf_names.LAYER_PARTS`; "blk" is a layer itself.
        unused_keys: keys that files have and that do not change the mathematics.
        reorders_pairs: rows of queries and keys are stored for a rotation of neighbouring pairs.
        rotates_part: the first dimensions of a head may be rotated alone.
        has_experts: layers may have a router and experts instead of an MLP, or beside it.
        expert_count, expert_used_count: the config's names of the number of experts, and of those that a token uses.
        has_latents: attention caches latents.
        mixes_layers: layers may differ in their KV heads, 0 for a layer without attention.
        attends: False for a model without attention, whose keys of heads and of the MLP are 0.
        has_value_heads_in_turns: see `gguf_recurrent.py`.
        has_layer_sizes: head size and MLP columns differ between layers, as `gguf_gemma4.py` says.
        norm_offset: stored weights of norms are Hugging Face's plus this.
        epsilon_key: of the norms.
        factor_tensors: tensors of rotary divisors that may be there.
        config_names: the config's names of sizes, where they are not Llama's.
    """

    hf_class: str
    model_type: str
    _: KW_ONLY
    names: Mapping[str, str] = field(default_factory=dict)
    unused_keys: frozenset[str] = frozenset()
    reorders_pairs: bool = False
    rotates_part: bool = False
    has_experts: bool = False
    expert_count: str = "num_experts"
    expert_used_count: str = "num_experts_per_tok"
    has_latents: bool = False
    mixes_layers: bool = False
    attends: bool = True
    has_value_heads_in_turns: bool = False
    has_layer_sizes: bool = False
    norm_offset: float = 0.0
    epsilon_key: str = "attention.layer_norm_rms_epsilon"
    factor_tensors: tuple[str, ...] = (ROPE_FACTORS,)
    config_names: Mapping[str, str] = field(default_factory=dict)


def _state_space_names(module: str) -> dict[str, str]:
    """The names of Mamba 2's tensors, which are those of delta nets where both have one."""
    names = {
        "ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_dt": "dt_bias", "ssm_a": "A_log", "ssm_d": "D",
        "ssm_norm": "norm", "ssm_out": "out_proj",
    }  # fmt: skip
    return {part: f"{module}.{name}" for part, name in names.items()}


def _delta_net(hf_class: str, model_type: str, *, has_experts: bool = False, in_turns: bool = True) -> Architecture:
    """Delta nets beside gated attention. `in_turns`: their value heads are stored so."""
    names = {
        "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_ba": "in_proj_ba", "ssm_alpha": "in_proj_a",
        "ssm_beta": "in_proj_b",
    }  # fmt: skip
    return Architecture(
        hf_class,
        model_type,
        names={
            **_state_space_names("linear_attn"), **{part: f"linear_attn.{name}" for part, name in names.items()},
            **SECOND_NORM, **SHARED_EXPERT,
        },
        unused_keys=frozenset({"rope.dimension_sections"}),
        rotates_part=True,
        has_experts=has_experts,
        mixes_layers=True,
        has_value_heads_in_turns=in_turns,
        norm_offset=1.0,
    )  # fmt: skip


GRANITE4_NAMES = {
    **_state_space_names("mamba"),
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.*.{part}_proj" for part in ("gate", "up", "down")},
    **{
        f"ffn_{part}{suffix}": f"shared_mlp.{name}"
        for part, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "output_linear"))
        for suffix in ("", "_shexp")
    },
}
STATE_KEYS = frozenset(
    f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", reorders_pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", has_experts=True),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", names=SHARED_EXPERT, has_experts=True),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", has_experts=True),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", names=SECOND_NORM, has_experts=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", reorders_pairs=True),
    "mistral3": Architecture("Ministral3ForCausalLM", "ministral3", reorders_pairs=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", names=NORMS_AROUND),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", names=NORMS_AROUND, norm_offset=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", names=NORMS_AROUND, norm_offset=1.0),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        names={
            **NORMS_AROUND,
            "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps": "experts.gate_up_proj", "ffn_down_exps": "experts.down_proj",
            "post_ffw_norm_1": "post_feedforward_layernorm_1", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        has_experts=True,
        expert_used_count="top_k_experts",
        mixes_layers=True,
        has_layer_sizes=True,
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        "granite",
        # Granite 4 without state spaces has keys of what it lacks, too.
        unused_keys=STATE_KEYS | {"expert_shared_feed_forward_length"},
        reorders_pairs=True,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        names=GRANITE4_NAMES,
        unused_keys=frozenset({"expert_shared_feed_forward_length"}),
        reorders_pairs=True,
        has_experts=True,
        expert_count="num_local_experts",
        mixes_layers=True,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        rotates_part=True,
        factor_tensors=(LONG_FACTORS, SHORT_FACTORS),
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        rotates_part=True,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon_key="attention.layer_norm_epsilon",
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        names={
            "blk": "transformer.h", "token_embd": "transformer.wte", "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f", "attn_norm": "ln_1", "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        epsilon_key="attention.layer_norm_epsilon",
        config_names={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
        },
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        names={
            "blk": "gpt_neox.layers", "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm",
            "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
        },
        rotates_part=True,
        epsilon_key="attention.layer_norm_epsilon",
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        has_experts=True,
        expert_count="n_routed_experts",
        has_latents=True,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        "lfm2",
        names={
            "token_embd_norm": "model.norm",
            **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
        },
        mixes_layers=True,
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "mamba2",
        names={
            "blk": "backbone.layers", "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f",
            "attn_norm": "norm", **_state_space_names("mixer"),
        },
        attends=False,
    ),
    "qwen3next": _delta_net("Qwen3NextForCausalLM", "qwen3_next", has_experts=True, in_turns=False),
    "qwen35": _delta_net("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": _delta_net("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", has_experts=True),
}  # fmt: skip
"""By GGUF's name."""
GRANITE4_DENSE = replace(ARCHITECTURES["granite"], names=GRANITE4_NAMES)
"""Granite 4 without state spaces and experts, which is Granite 3 in GGUF."""
MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", reorders_pairs=True, has_experts=True)


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a file whose name of it is known: "llama" with experts is Mixtral."""
    name = metadata["general.architecture"]
    return MIXTRAL if name == "llama" and metadata.get("llama.expert_count", 0) != 0 else ARCHITECTURES[name]
