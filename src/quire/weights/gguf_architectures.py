"""`ARCHITECTURES`: what the GGUF architectures store, and as which Hugging Face models.

Sources of the names and keys: the tables of the gguf package. Next to read: `gguf_config.py`, which adds the fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.weights.gguf_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
MLP = ("ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
GPT_PARTS = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
LLAMA_PARTS = ("attn_norm", *ATTENTION, "ffn_norm", *MLP)
NORMS_AROUND = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SSM = ("ssm_in", "ssm_conv1d", "ssm_dt.bias", "ssm_a", "ssm_d", "ssm_norm", "ssm_out")
STATE_KEYS = frozenset(
    f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)
GRANITE_KEYS = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
SHARED_EXPERT = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
EXPERT_KEYS = frozenset({"expert_feed_forward_length", "expert_shared_feed_forward_length"})
DELTA_KEYS = STATE_KEYS | {"attention.recurrent_layers", "full_attention_interval", "nextn_predict_layers"}
DELTA_PARTS = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_dt.bias", "ssm_a", "ssm_norm", "ssm_out")
WINDOW_KEYS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Tensors, names and keys of one architecture.

    Fields:
        hf_class, model_type: of the Hugging Face config.
        parts: the tensors of a layer.
        names: parts whose Hugging Face names are not those of `gguf_names.LAYER_PARTS`; "blk" is a layer itself.
        keys: keys that `gguf_config` or `gguf_rope` understand, beside those of all architectures.
        biases: parts that have biases.
        optional_biases: groups of parts that have biases together or not at all.
        reorders_pairs: rows of queries and keys are stored for a rotation of neighbouring pairs.
        rotates_part: the first dimensions of a head may be rotated alone.
        fuses_gate: `ffn_up` has the rows of gates, then those of ups.
        has_experts: each layer has a router and experts instead of an MLP.
        expert_count, expert_used_count: the config's names of the number of experts, and of those that a token uses.
        has_latents: attention caches latents; the first layers may have an MLP.
        hybrid_parts: of layers without attention, instead of `attention_parts`; empty if all layers are equal.
        attention_parts: of the other layers.
        attends: False for a model without attention, whose keys of heads and of the MLP are 0.
        has_value_heads_in_turns: see `gguf_recurrent.py`.
        final_norm: the tensor of the norm before the head.
        sizes_by_layer: head size, KV heads and MLP columns differ between layers, as `gguf_gemma4.py` says.
        norms_whole: norms of queries and keys are over all heads.
        norm_offset: stored weights of norms are Hugging Face's plus this.
        epsilon_key: of the norms.
        factor_tensors: tensors of rotary divisors that may be there.
        has_positions: learned embeddings of positions.
        config_names: the config's names of sizes, where they are not Llama's.
        is_written: `quire quantize` writes it from Hugging Face's tensors.
    """

    hf_class: str
    model_type: str
    parts: tuple[str, ...] = LLAMA_PARTS
    names: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    biases: tuple[str, ...] = ()
    optional_biases: tuple[tuple[str, ...], ...] = ()
    reorders_pairs: bool = False
    rotates_part: bool = False
    fuses_gate: bool = False
    has_experts: bool = False
    expert_count: str = "num_experts"
    expert_used_count: str = "num_experts_per_tok"
    has_latents: bool = False
    hybrid_parts: tuple[str, ...] = ()
    attention_parts: tuple[str, ...] = ()
    attends: bool = True
    has_value_heads_in_turns: bool = False
    final_norm: str = "output_norm"
    sizes_by_layer: bool = False
    norms_whole: bool = False
    norm_offset: float = 0.0
    epsilon_key: str = "attention.layer_norm_rms_epsilon"
    factor_tensors: tuple[str, ...] = (ROPE_FACTORS,)
    has_positions: bool = False
    config_names: Mapping[str, str] = field(default_factory=dict)
    is_written: bool = True

    @property
    def has_state(self) -> bool:
        """True if layers are state spaces or delta nets."""
        return "ssm_a" in (*self.parts, *self.hybrid_parts)


def _state_space_names(module: str) -> dict[str, str]:
    """The names of Mamba 2's tensors, which are those of delta nets where both have one."""
    names = {
        "ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_dt": "dt_bias", "ssm_a": "A_log", "ssm_d": "D",
        "ssm_norm": "norm", "ssm_out": "out_proj",
    }  # fmt: skip
    return {part: f"{module}.{name}" for part, name in names.items()}


def _delta_net(hf_class: str, model_type: str, *gates: str, has_experts: bool = False) -> Architecture:
    """Delta nets beside gated attention. `gates`: the tensors of their gates."""
    names = {
        "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_ba": "in_proj_ba", "ssm_alpha": "in_proj_a",
        "ssm_beta": "in_proj_b",
    }  # fmt: skip
    mlp = (*EXPERTS, "ffn_gate_inp_shexp", *SHARED_EXPERT) if has_experts else MLP
    return Architecture(
        hf_class=hf_class,
        model_type=model_type,
        parts=("attn_norm", "post_attention_norm", *mlp),
        names={
            **_state_space_names("linear_attn"), **{part: f"linear_attn.{name}" for part, name in names.items()},
            **SHARED_EXPERT,
        },
        keys=DELTA_KEYS | EXPERT_KEYS | {"rope.dimension_sections"},
        rotates_part=True,
        has_experts=has_experts,
        hybrid_parts=(*DELTA_PARTS, *gates),
        attention_parts=(*ATTENTION, "attn_q_norm", "attn_k_norm"),
        has_value_heads_in_turns="ssm_alpha" in gates,
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
ARCHITECTURES = {
    "llama": Architecture(
        hf_class="LlamaForCausalLM",
        model_type="llama",
        optional_biases=(ATTENTION, MLP),
        reorders_pairs=True,
    ),
    "qwen2": Architecture(hf_class="Qwen2ForCausalLM", model_type="qwen2", biases=ATTENTION[:3]),
    "qwen3": Architecture(
        hf_class="Qwen3ForCausalLM",
        model_type="qwen3",
        parts=(*LLAMA_PARTS, "attn_q_norm", "attn_k_norm"),
        optional_biases=(ATTENTION,),
    ),
    "qwen3moe": Architecture(
        hf_class="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        parts=("attn_norm", *ATTENTION, "attn_q_norm", "attn_k_norm", "ffn_norm", *EXPERTS),
        keys=frozenset({"expert_feed_forward_length"}),
        optional_biases=(ATTENTION,),
        has_experts=True,
    ),
    "olmoe": Architecture(
        hf_class="OlmoeForCausalLM",
        model_type="olmoe",
        parts=("attn_norm", *ATTENTION, "attn_q_norm", "attn_k_norm", "ffn_norm", *EXPERTS),
        has_experts=True,
        norms_whole=True,
    ),
    "gpt-oss": Architecture(
        hf_class="GptOssForCausalLM",
        model_type="gpt_oss",
        parts=("attn_norm", *ATTENTION, "attn_sinks", "post_attention_norm", *EXPERTS),
        keys=frozenset({"expert_feed_forward_length"}),
        biases=(*ATTENTION, *EXPERTS),
        has_experts=True,
        is_written=False,
    ),
    "phi3": Architecture(
        hf_class="Phi3ForCausalLM",
        model_type="phi3",
        parts=("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        rotates_part=True,
        fuses_gate=True,
        factor_tensors=(LONG_FACTORS, SHORT_FACTORS),
    ),
    "smollm3": Architecture(
        hf_class="SmolLM3ForCausalLM",
        model_type="smollm3",
        optional_biases=(ATTENTION, MLP),
        reorders_pairs=True,
    ),
    "olmo2": Architecture(
        hf_class="Olmo2ForCausalLM",
        model_type="olmo2",
        parts=(*ATTENTION, "attn_q_norm", "attn_k_norm", "post_attention_norm", *MLP, "post_ffw_norm"),
        names=NORMS_AROUND,
        keys=WINDOW_KEYS,
        norms_whole=True,
    ),
    "granite": Architecture(
        hf_class="GraniteForCausalLM",
        model_type="granite",
        # Granite 4 without state spaces has keys of what it lacks, too.
        keys=GRANITE_KEYS | STATE_KEYS | {"expert_shared_feed_forward_length"},
        optional_biases=(ATTENTION, MLP),
        reorders_pairs=True,
    ),
    "gemma2": Architecture(
        hf_class="Gemma2ForCausalLM",
        model_type="gemma2",
        parts=(*LLAMA_PARTS, "post_attention_norm", "post_ffw_norm"),
        names=NORMS_AROUND,
        keys=frozenset({
            "attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window_pattern",
        }),
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        hf_class="Gemma3ForCausalLM",
        model_type="gemma3_text",
        parts=(*LLAMA_PARTS, "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
        names=NORMS_AROUND,
        keys=WINDOW_KEYS | {"final_logit_softcapping"},
        norm_offset=1.0,
    ),
    "gemma4": Architecture(
        hf_class="Gemma4ForCausalLM",
        model_type="gemma4_text",
        names=NORMS_AROUND | {
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        keys=WINDOW_KEYS | {
            "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa",
            "attention.shared_kv_layers", "embedding_length_per_layer_input", "final_logit_softcapping",
        },
        sizes_by_layer=True,
        is_written=False,
    ),
    "glm4": Architecture(
        hf_class="Glm4ForCausalLM",
        model_type="glm4",
        parts=("attn_norm", *ATTENTION, "post_attention_norm", "ffn_norm", "ffn_up", "ffn_down", "post_ffw_norm"),
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        optional_biases=(ATTENTION[:3],),
        rotates_part=True,
        fuses_gate=True,
    ),
    "starcoder2": Architecture(
        hf_class="Starcoder2ForCausalLM",
        model_type="starcoder2",
        parts=("attn_norm", *ATTENTION, "ffn_norm", "ffn_up", "ffn_down"),
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        keys=frozenset({"attention.layer_norm_epsilon"}),
        biases=("attn_norm", "ffn_norm"),
        optional_biases=((*ATTENTION, "ffn_up", "ffn_down"),),
        epsilon_key="attention.layer_norm_epsilon",
    ),
    "gpt2": Architecture(
        hf_class="GPT2LMHeadModel",
        model_type="gpt2",
        parts=GPT_PARTS,
        names={
            "blk": "transformer.h", "token_embd": "transformer.wte", "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f", "attn_norm": "ln_1", "attn_qkv": "attn.c_attn_rows",
            "attn_output": "attn.c_proj_rows", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc_rows",
            "ffn_down": "mlp.c_proj_rows",
        },
        keys=frozenset({"attention.layer_norm_epsilon"}),
        biases=GPT_PARTS,
        epsilon_key="attention.layer_norm_epsilon",
        has_positions=True,
        config_names={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
        },
    ),
    "gptneox": Architecture(
        hf_class="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        parts=GPT_PARTS,
        names={
            "blk": "gpt_neox.layers", "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm",
            "attn_qkv": "attention.query_key_value_rows", "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
        },
        keys=frozenset({"attention.layer_norm_epsilon", "use_parallel_residual"}),
        biases=GPT_PARTS,
        rotates_part=True,
        epsilon_key="attention.layer_norm_epsilon",
    ),
    "deepseek2": Architecture(
        hf_class="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        parts=("attn_norm", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_kv_b", "attn_output", "ffn_norm"),
        keys=frozenset({
            "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla",
            "attention.value_length_mla", "leading_dense_block_count", "expert_shared_count",
            "expert_feed_forward_length", "expert_weights_scale", "expert_weights_norm", "expert_gating_func",
            "expert_group_count", "expert_group_used_count", "rope.scaling.yarn_log_multiplier",
        }),
        has_experts=True,
        expert_count="n_routed_experts",
        has_latents=True,
        is_written=False,
    ),
    "lfm2": Architecture(
        hf_class="Lfm2ForCausalLM",
        model_type="lfm2",
        parts=("attn_norm", "ffn_norm", *MLP),
        names={f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
        keys=frozenset({"shortconv.l_cache"}),
        hybrid_parts=("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj"),
        attention_parts=(*ATTENTION, "attn_q_norm", "attn_k_norm"),
        final_norm="token_embd_norm",
        is_written=False,
    ),
    "mistral3": Architecture(
        hf_class="Ministral3ForCausalLM",
        model_type="ministral3",
        keys=frozenset({"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"}),
        reorders_pairs=True,
    ),
    "qwen2moe": Architecture(
        hf_class="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        parts=("attn_norm", *ATTENTION, "ffn_norm", *EXPERTS, "ffn_gate_inp_shexp", *SHARED_EXPERT),
        names=SHARED_EXPERT,
        keys=EXPERT_KEYS,
        biases=ATTENTION[:3],
        has_experts=True,
    ),
    "mamba2": Architecture(
        hf_class="Mamba2ForCausalLM",
        model_type="mamba2",
        parts=("attn_norm", *SSM),
        names={
            "blk": "backbone.layers", "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f",
            "attn_norm": "norm", **_state_space_names("mixer"),
        },
        keys=STATE_KEYS,
        attends=False,
    ),
    "granitehybrid": Architecture(
        hf_class="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        parts=("attn_norm", "ffn_norm", *MLP),
        names=GRANITE4_NAMES,
        keys=GRANITE_KEYS | STATE_KEYS | {"expert_shared_feed_forward_length"},
        reorders_pairs=True,
        hybrid_parts=SSM,
        attention_parts=ATTENTION,
    ),
    "qwen3next": _delta_net("Qwen3NextForCausalLM", "qwen3_next", "ssm_ba", has_experts=True),
    "qwen35": _delta_net("Qwen3_5ForCausalLM", "qwen3_5_text", "ssm_alpha", "ssm_beta"),
    "qwen35moe": _delta_net(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "ssm_alpha", "ssm_beta", has_experts=True
    ),
}  # fmt: skip
"""By GGUF's name. The final norm has a bias if those of the layers have one."""

MIXTRAL = Architecture(
    hf_class="MixtralForCausalLM",
    model_type="mixtral",
    parts=("attn_norm", *ATTENTION, "ffn_norm", *EXPERTS),
    reorders_pairs=True,
    has_experts=True,
)
GRANITE4_MOE = replace(
    ARCHITECTURES["granitehybrid"],
    parts=("attn_norm", "ffn_norm", *EXPERTS, *SHARED_EXPERT),
    has_experts=True,
    expert_count="num_local_experts",
)
GEMMA4_MOE = replace(
    ARCHITECTURES["gemma4"],
    names={
        **ARCHITECTURES["gemma4"].names,
        "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps": "experts.gate_up_proj", "ffn_down_exps": "experts.down_proj",
        "post_ffw_norm_1": "post_feedforward_layernorm_1", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    keys=ARCHITECTURES["gemma4"].keys | {"expert_feed_forward_length"},
    has_experts=True,
    expert_used_count="top_k_experts",
)  # fmt: skip
WITH_EXPERTS = {"llama": MIXTRAL, "granitehybrid": GRANITE4_MOE, "gemma4": GEMMA4_MOE}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a file whose name of it is known: "llama" with experts is Mixtral."""
    name = metadata["general.architecture"]
    has_experts = metadata.get(f"{name}.expert_count", 0) != 0
    return WITH_EXPERTS[name] if has_experts and name in WITH_EXPERTS else ARCHITECTURES[name]
