"""`ARCHITECTURES`: the tables of GGUF architectures: their keys, their names of tensors, and the Hugging Face models.

Both directions read them: `gguf_config.py` and `checkpoint.py` make a config.json and Hugging Face's names of them,
`quire_workshop/gguf/export.py` makes GGUF's. Sources of the names and keys: the tables of the gguf package, llama.cpp's
converter. Next to read: `gguf_fields.py` for the rows.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from quire.errors import UnsupportedModelError
from quire.weights import gguf_codecs as codecs
from quire.weights.gguf_codecs import FULL, SLIDING, Codec, exact_share
from quire.weights.gguf_fields import (
    EPSILON,
    LLAMA,
    LONG_FACTORS,
    ROPE_FACTORS,
    ROTATED_SHARE,
    SHORT_FACTORS,
    SIZES,
    Field,
    TensorNames,
)
from quire.weights.gguf_file import Metadata
from quire.weights.gguf_recurrent import DELTA_NET, SECTIONS, expansion, layers_with, state_space, state_space_names
from quire.weights.gguf_recurrent import KEYS as STATE_KEYS
from quire.weights.gguf_rope import finish_deepseek, finish_gpt_oss, finish_ministral, finish_olmo3, read_factors

SIGMOID = 2
"""llama.cpp's number of a score of experts; 1 is softmax."""
LARGEST_GEMMAS = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models of 27 B parameters, whose scores are scaled by hidden size / heads instead of the head size."""
SILU = {"hidden_act": "silu"}
BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}


@dataclass(frozen=True)
class Architecture:
    """Names and keys of one architecture. The model itself knows which tensors it has, and their shapes.

    Fields:
        hf_class, model_type: of the Hugging Face config.
        fields: rows beside those of `base`, and in place of those with the same key or name.
        unsaid: fields that files do not say: values, or functions of the fields that are read.
        finish: a function that changes the fields of the metadata by what rows cannot say.
        biases: fields that are true if layers have this tensor.
        config_names: config.json's names of Llama's fields where they differ, "" for one that it does not have.
        names: parts whose Hugging Face names are not those of `gguf_names.LAYER_PARTS`; "blk" is a layer itself.
        unused_keys: keys that files have and that do not change the mathematics.
        reorders_pairs: rows of queries and keys are stored for a rotation of neighbouring pairs.
        has_value_heads_in_turns: see `gguf_recurrent.py`.
        norm_offset: stored weights of norms are Hugging Face's plus this.
        factor_tensors: tensors of rotary divisors that may be there.
        predictors: config.json's name of the number of layers behind the last that predict further tokens; "" for
            models of which these layers are not read.
        variants: other models under the same name: the first of which the value of a key, 0 if missing, fits.
    """

    hf_class: str
    model_type: str
    _: KW_ONLY
    base: tuple[Field, ...] = LLAMA
    fields: tuple[Field, ...] = ()
    unsaid: Mapping[str, Any] = field(default_factory=lambda: SILU)
    finish: Callable[[Metadata], None] | None = None
    biases: Mapping[str, str] = field(default_factory=lambda: BIASES)
    config_names: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    unused_keys: frozenset[str] = frozenset()
    reorders_pairs: bool = False
    has_value_heads_in_turns: bool = False
    norm_offset: float = 0.0
    factor_tensors: tuple[str, ...] = (ROPE_FACTORS,)
    predictors: str = ""
    variants: "tuple[tuple[str, Callable[[Any], bool], Architecture], ...]" = ()

    @functools.cached_property
    def base_rows(self) -> tuple[Field, ...]:
        """The rows of `base` that no own row replaces; they are read first."""
        own = {name for row in self.fields for name in (row.key, row.name)}
        return tuple(row for row in self.base if row.key not in own and (row.name or row.key) not in own)

    @property
    def rows(self) -> tuple[Field, ...]:
        """All rows, in the order in which they are read and written."""
        return (*self.base_rows, *self.fields)

    @functools.cached_property
    def tensor_names(self) -> TensorNames:
        """The table of tensors."""
        return TensorNames(self.names)


# --- Rows of several architectures ----------------------------------------------------------

WINDOW = Field("attention.sliding_window", "sliding_window", codecs.WINDOW, attribute="windows")
QWEN = (WINDOW, Field("attention.sliding_window", "use_sliding_window", codecs.IS_SET))
QWEN_UNSAID = {**SILU, "max_window_layers": 0}
MULTIPLES = (
    Field(
        "attention.scale",
        "attention_multiplier",
        codecs.NUMBER,
        lambda fields: fields["head_dim"] ** -0.5,
        "score_scale",
    ),
    Field("embedding_scale", "embedding_multiplier", codecs.NUMBER, 1.0),
    Field("residual_scale", "residual_multiplier", codecs.NUMBER, 1.0),
    Field("logit_scale", "logits_scaling", codecs.NUMBER, 1.0, "logits_divisor"),
)
EXPERT_SIZE = Field("expert_feed_forward_length", "moe_intermediate_size", attribute="expert_size")
ROTATES = Codec(lambda metadata, key, default: "rope" if metadata.flag(key, default) else "nope")
LOCAL_THETA = Field("rope.freq_base_swa", "rope_local_base_freq", codecs.NUMBER, 10000.0, "local_rope.theta")


def _experts(count: str, codec: Codec = codecs.COUNT, default: Any = None) -> tuple[Field, ...]:
    """The number of experts, by config.json's name, and that of the experts of a token."""
    return (
        Field("expert_count", count, codec, default, "num_experts"),
        Field("expert_used_count", "num_experts_per_tok", codec, default, "top_k"),
    )


SHARED_EXPERTS = (
    *_experts("num_experts"),
    EXPERT_SIZE,
    Field("expert_shared_feed_forward_length", "shared_expert_intermediate_size", attribute="shared_size"),
)


LAYER_NORMS = Field("attention.layer_norm_epsilon", "rms_norm_eps", codecs.NUMBER, attribute="rms_norm_epsilon")


def _score_size(config: Mapping[str, Any]) -> int:
    """Return Gemma's `query_pre_attn_scalar`."""
    is_largest = config["num_hidden_layers"] == LARGEST_GEMMAS[config["model_type"]]
    return int(config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"])


ROUTED_EXPERTS = (
    *_experts("n_routed_experts"),
    EXPERT_SIZE,
    Field("expert_shared_count", "n_shared_experts", attribute=lambda read: read.shared_size // read.expert_size),
    Field(
        "leading_dense_block_count",
        "first_k_dense_replace",
        codecs.SIZE,
        0,
        lambda read: (*read.sparse_layers, True).index(True),
    ),
    Field("expert_weights_scale", "routed_scaling_factor", codecs.NUMBER, 1.0, "scoring.factor"),
    Field("expert_weights_norm", "norm_topk_prob", codecs.FLAG, False, "renormalise"),
    Field("expert_group_count", "n_group", codecs.COUNT, 1, "scoring.num_groups"),
    Field("expert_group_used_count", "topk_group", codecs.COUNT, 1, "scoring.top_groups"),
    Field("expert_gating_func", "", codecs.COUNT, 1, lambda read: SIGMOID if read.scoring.is_sigmoid else 1),
)

DEEPSEEK = (
    *ROUTED_EXPERTS,
    # Cached latents are one head of key_length and value_length; files whose projections to keys and values are one
    # tensor have the sizes of heads under these keys instead.
    Field("rope.dimension_count", "qk_rope_head_dim", attribute="rotary_size"),
    Field(
        "attention.key_length_mla",
        "qk_nope_head_dim",
        Codec(lambda metadata, key, default: metadata.integer(key, default) - metadata.fields["qk_rope_head_dim"]),
        "head_dim",
        lambda read: read.nope_size + read.rotary_size,
    ),
    Field("attention.value_length", "value_length", attribute="kv_rank"),
    Field("attention.value_length_mla", "v_head_dim", codecs.COUNT, "value_length", "value_size"),
    Field("attention.kv_lora_rank", "kv_lora_rank", attribute="kv_rank"),
    Field("attention.q_lora_rank", "q_lora_rank", codecs.OPTIONAL, attribute="query_rank"),
)

# --- Names of several architectures ---------------------------------------------------------

SECOND_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""Of architectures that do not call it `ffn_norm`."""
NORMS_AROUND = {
    **SECOND_NORM,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GATE_UP_DOWN = ("gate", "up", "down")
SHARED_EXPERT = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in GATE_UP_DOWN}


DELTA_NAMES = {
    **state_space_names("linear_attn"), "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    **SECOND_NORM, **SHARED_EXPERT,
}  # fmt: skip
GRANITE4_NAMES = {
    **state_space_names("mamba"),
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.*.{part}_proj" for part in GATE_UP_DOWN},
    **{
        f"ffn_{part}{suffix}": f"shared_mlp.{name}"
        for part, name in zip(GATE_UP_DOWN, ("gate_proj", "up_proj", "output_linear"), strict=True)
        for suffix in ("", "_shexp")
    },
}

# --- Gemma 4: head size, KV heads and MLP columns differ by layer ---------------------------------

NO_ROTATION = 1e20
"""A divisor of rotary frequencies above this stands for a frequency of 0."""
GEMMA4 = (
    Field("attention.key_length", "global_head_dim", attribute="full_head_size"),
    Field("attention.key_length_swa", "head_dim", codecs.COUNT, "global_head_dim", "head_size"),
    Field("attention.value_length", "", codecs.SAME, "global_head_dim", "full_head_size"),
    Field("rope.dimension_count", "", codecs.SAME, "global_head_dim", "full_head_size"),
    Field("attention.value_length_swa", "", codecs.SAME, "head_dim", "head_size"),
    Field("rope.dimension_count_swa", "", codecs.SAME, "head_dim", "head_size"),
    Field("attention.sliding_window", "sliding_window", codecs.WINDOW, attribute="windows"),
    Field("attention.sliding_window_pattern", "layer_types", codecs.TYPES, 6, "windows"),
    Field(
        "attention.shared_kv_layers",
        "num_kv_shared_layers",
        codecs.SIZE,
        0,
        lambda read: sum(index != source for index, source in enumerate(read.sources)),
    ),
    Field(
        "attention.head_count_kv",
        "num_key_value_heads",
        codecs.BY_LAYER,
        attribute=lambda read: [read.of_layer(index).num_kv_heads for index in range(read.num_layers)],
    ),
    Field(
        "feed_forward_length",
        "intermediate_size",
        codecs.BY_LAYER,
        attribute=lambda read: [read.of_layer(index).intermediate_size for index in range(read.num_layers)],
    ),
    Field("embedding_length_per_layer_input", "hidden_size_per_layer_input", codecs.SIZE, 0, "per_layer_size"),
    Field("final_logit_softcapping", "final_logit_softcapping", codecs.OPTIONAL_NUMBER, attribute="logit_cap"),
    Field("expert_count", "num_experts", codecs.OPTIONAL, attribute="num_experts"),
    Field("expert_used_count", "top_k_experts", codecs.OPTIONAL, attribute="top_k"),
    Field("expert_feed_forward_length", "moe_intermediate_size", codecs.OPTIONAL, attribute="expert_size"),
)
GEMMA4_NAMES = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale", "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_2": "post_feedforward_layernorm_2",
}  # fmt: skip


def finish_gemma4(metadata: Metadata) -> None:
    """Make sizes of the layers with and without a window of those of all layers. Mutates: metadata."""
    config = metadata.fields
    types, widths, kv_heads = config["layer_types"], config["intermediate_size"], config["num_key_value_heads"]
    num_layers, num_shared, tensors = len(types), config["num_kv_shared_layers"], metadata.file.tensors
    num_own, widens = num_layers - num_shared, num_shared > 0 and widths[-1] != widths[0]
    by_type = dict(zip(types, kv_heads, strict=True))
    expected = [widths[0] * (2 if widens and index >= num_own else 1) for index in range(num_layers)]
    if kv_heads != [by_type[kind] for kind in types] or widths != expected:
        raise UnsupportedModelError(f"{metadata.path}: KV heads or MLP columns differ between layers of one kind")
    table, full_head_size = tensors.get("per_layer_token_embd.weight"), config["global_head_dim"]
    shares_values = any(
        kind == FULL and index < num_own and f"blk.{index}.attn_v.weight" not in tensors
        for index, kind in enumerate(types)
    )
    config |= {
        "num_key_value_heads": by_type.get(SLIDING, by_type.get(FULL)),
        "num_global_key_value_heads": by_type.get(FULL),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widens,
        "attention_k_eq_v": shares_values,
        "enable_moe_block": config["num_experts"] is not None,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": _rotated_share(metadata, full_head_size),
            },
        },
    }
    if config["num_global_key_value_heads"] != config["num_key_value_heads"] and not shares_values:
        sizes = {"head_dim": full_head_size, "num_key_value_heads": by_type.get(FULL)}
        config["per_layer_config"] = {str(index): sizes for index, kind in enumerate(types) if kind == FULL}


def _rotated_share(metadata: Metadata, head_size: int) -> float:
    """The share of a head that is rotated: the first pairs, whose frequencies are divided by 1."""
    if ROPE_FACTORS not in metadata.file.tensors:
        return 1.0
    num_pairs = head_size // 2
    factors = read_factors(metadata.file, ROPE_FACTORS, num_pairs)
    rotated = int((factors == 1).sum())
    if not rotated or not np.all(factors[:rotated] == 1) or not np.all(factors[rotated:] > NO_ROTATION):
        raise UnsupportedModelError(
            f"{metadata.path}: '{ROPE_FACTORS}' is not ones, then divisors that leave no rotation"
        )
    return exact_share(rotated, num_pairs)


# --- The architectures ----------------------------------------------------------------------

MIXTRAL = Architecture(
    "MixtralForCausalLM", "mixtral", fields=(WINDOW, *_experts("num_local_experts")), reorders_pairs=True
)
MISTRAL = Architecture("MistralForCausalLM", "mistral", fields=(WINDOW,), reorders_pairs=True)
MINISTRAL3 = Architecture(
    "Ministral3ForCausalLM", "ministral3", fields=(WINDOW,), finish=finish_ministral, reorders_pairs=True
)
OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    "olmo3",
    names=NORMS_AROUND,
    finish=finish_olmo3,
    fields=(
        WINDOW,
        Field("attention.sliding_window_pattern", "layer_types", codecs.TYPES, 4, "windows"),
        replace(LOCAL_THETA, default="rope_theta"),
    ),
    config_names={"rope_local_base_freq": "", "rope_scaling": ""},
)
_deepseek = functools.partial(
    Architecture, fields=DEEPSEEK, finish=finish_deepseek, config_names={"head_dim": "", "value_length": ""}
)
DEEPSEEK_HEADS = {**SILU, "num_key_value_heads": lambda config: config["num_attention_heads"]}
_gemma = functools.partial(
    Architecture,
    names=NORMS_AROUND,
    norm_offset=1.0,
    unsaid={"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": _score_size},
)
_delta_net = functools.partial(
    Architecture,
    names=DELTA_NAMES,
    norm_offset=1.0,
    config_names={"full_attention_interval": ""},
    unused_keys=frozenset({"rope.dimension_sections"}),
    predictors="mtp_num_hidden_layers",
)
ARCHITECTURES = {
    "llama": Architecture(
        # Llama with a sliding window is what Mistral is.
        "LlamaForCausalLM",
        "llama",
        reorders_pairs=True,
        variants=(("expert_count", bool, MIXTRAL), ("attention.sliding_window", bool, MISTRAL)),
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", fields=QWEN, unsaid=QWEN_UNSAID),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", fields=QWEN, unsaid=QWEN_UNSAID),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        fields=(*QWEN, *_experts("num_experts"), EXPERT_SIZE),
        unsaid={**QWEN_UNSAID, "norm_topk_prob": True},
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        fields=(*QWEN, *SHARED_EXPERTS),
        names=SHARED_EXPERT,
        unsaid={**QWEN_UNSAID, "norm_topk_prob": False},
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM", "olmoe", fields=_experts("num_experts"), unsaid={**SILU, "norm_topk_prob": False}
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        names=SECOND_NORM,
        finish=finish_gpt_oss,
        fields=(
            WINDOW,
            *_experts("num_local_experts"),
            Field("feed_forward_length", "", codecs.WIDTH, attribute="intermediate_size"),
            Field("expert_feed_forward_length", "intermediate_size", attribute="intermediate_size"),
        ),
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM", "smollm3", unsaid={**SILU, "no_rope_layer_interval": 4}, reorders_pairs=True
    ),
    "mistral3": replace(MISTRAL, variants=(("attention.temperature_scale", bool, MINISTRAL3),)),
    "olmo2": Architecture(
        # OLMo 3 is OLMo 2 with windows to llama.cpp.
        "Olmo2ForCausalLM",
        "olmo2",
        names=NORMS_AROUND,
        variants=(("attention.sliding_window", bool, OLMO3),),
    ),
    "gemma2": _gemma(
        "Gemma2ForCausalLM",
        "gemma2",
        fields=(
            Field("attn_logit_softcapping", "attn_logit_softcapping", codecs.NUMBER, 50.0, "score_cap"),
            Field("final_logit_softcapping", "final_logit_softcapping", codecs.NUMBER, 30.0, "logit_cap"),
            replace(WINDOW, codec=replace(codecs.WINDOW, read=codecs.COUNT.read), default=4096),
            Field("attention.sliding_window_pattern", "layer_types", codecs.READ_TYPES, 2),
        ),
    ),
    "gemma3": _gemma(
        "Gemma3ForCausalLM",
        "gemma3_text",
        fields=(
            WINDOW,
            Field("attention.sliding_window_pattern", "layer_types", codecs.READ_TYPES, 6),
            LOCAL_THETA,
            Field("final_logit_softcapping", "final_logit_softcapping", codecs.OPTIONAL_NUMBER, attribute="logit_cap"),
        ),
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        fields=(LOCAL_THETA, *GEMMA4),
        finish=finish_gemma4,
        names={**NORMS_AROUND, **GEMMA4_NAMES},
        unsaid={"hidden_activation": "gelu_pytorch_tanh"},
        config_names={"rope_theta": "", "rope_local_base_freq": ""},
    ),
    "granite": Architecture(
        # Granite 4 without state spaces has keys of what it lacks, too.
        "GraniteForCausalLM",
        "granite",
        fields=MULTIPLES,
        reorders_pairs=True,
        unused_keys=frozenset({"expert_shared_feed_forward_length", *(f"ssm.{name}" for name in STATE_KEYS)}),
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        names=GRANITE4_NAMES,
        reorders_pairs=True,
        biases={**BIASES, "mamba_conv_bias": "ssm_conv1d.bias"},
        unsaid={**SILU, "mamba_proj_bias": False, "mamba_expand": expansion("mamba_n_heads", "mamba_d_head")},
        fields=(
            *MULTIPLES,
            *_experts("num_local_experts", codecs.SIZE, 0),
            *layers_with("mamba"),
            Field(
                "feed_forward_length",
                "intermediate_size",
                codecs.WIDTH,
                attribute=lambda read: read.expert_size if read.num_experts else read.intermediate_size,
            ),
            Field(
                "expert_shared_feed_forward_length",
                "shared_intermediate_size",
                codecs.OPTIONAL,
                "intermediate_size",
                "intermediate_size",
            ),
            Field("rope.scaling.finetuned", "position_embedding_type", ROTATES, True, "rotates"),
            *state_space("mamba_d_conv", "mamba_d_state", "mamba_n_heads", "mamba_n_groups", "mamba_d_head"),
        ),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        fields=(ROTATED_SHARE, WINDOW),
        factor_tensors=(LONG_FACTORS, SHORT_FACTORS),
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        fields=(ROTATED_SHARE,),
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        names=SECOND_NORM,
        predictors="num_nextn_predict_layers",
        fields=(ROTATED_SHARE, *ROUTED_EXPERTS),
        biases={**BIASES, "use_qk_norm": "attn_q_norm.weight"},
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        fields=(LAYER_NORMS, WINDOW),
        unsaid={"hidden_act": "gelu_pytorch_tanh"},
        biases={**BIASES, "use_bias": "attn_q.bias"},
        config_names={"rms_norm_eps": "norm_epsilon"},
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        fields=(LAYER_NORMS,),
        unsaid={"activation_function": "gelu_new"},
        biases={},
        config_names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
            **dict.fromkeys(("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling"), ""),
        },
        names={
            "blk": "transformer.h",
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        unsaid={"hidden_act": "gelu"},
        biases={},
        fields=(
            ROTATED_SHARE,
            LAYER_NORMS,
            Field("use_parallel_residual", "use_parallel_residual", codecs.FLAG, True, "parallel"),
        ),
        config_names={
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
            "num_key_value_heads": "",
            "head_dim": "",
        },
        names={
            "blk": "gpt_neox.layers",
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
    ),
    "deepseek2": _deepseek(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        unsaid={
            **DEEPSEEK_HEADS,
            "topk_method": lambda config: "greedy" if config["n_group"] == 1 else "group_limited_greedy",
        },
        variants=(
            (
                "expert_gating_func",
                lambda value: value == SIGMOID,
                _deepseek(
                    "DeepseekV3ForCausalLM", "deepseek_v3", unsaid=DEEPSEEK_HEADS, predictors="num_nextn_predict_layers"
                ),
            ),
        ),
    ),
    "lfm2": Architecture(
        # feed_forward_length is adjusted already.
        "Lfm2ForCausalLM",
        "lfm2",
        unsaid={**SILU, "block_auto_adjust_ff_dim": False},
        config_names={"rms_norm_eps": "norm_eps"},
        fields=(
            *layers_with("conv"),
            Field("shortconv.l_cache", "conv_L_cache", attribute="num_taps"),
        ),
        names={
            "token_embd_norm": "model.norm",
            **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
        },
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "mamba2",
        base=SIZES,
        biases={"use_conv_bias": "ssm_conv1d.bias"},
        unsaid={"use_bias": False, "expand": expansion("num_heads", "head_dim")},
        fields=(
            Field("context_length", "", attribute="context_len"),
            Field("feed_forward_length", "", codecs.WRITTEN, attribute=lambda read: 0),
            Field("attention.head_count", "", codecs.WRITTEN, attribute=lambda read: 0),
            replace(EPSILON, name="layer_norm_epsilon", attribute="state_space.epsilon"),
            *state_space("conv_kernel", "state_size", "num_heads", "n_groups", "head_dim"),
        ),
        names={
            "blk": "backbone.layers",
            "token_embd": "backbone.embeddings",
            "output_norm": "backbone.norm_f",
            "attn_norm": "norm",
            **state_space_names("mixer"),
        },
    ),
    "qwen3next": _delta_net(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        fields=(*DELTA_NET, *SHARED_EXPERTS),
        unsaid={**SILU, "norm_topk_prob": True},
    ),
    "qwen35": _delta_net(
        "Qwen3_5ForCausalLM", "qwen3_5_text", fields=(*DELTA_NET, *SECTIONS), has_value_heads_in_turns=True
    ),
    "qwen35moe": _delta_net(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        fields=(*DELTA_NET, *SECTIONS, *SHARED_EXPERTS),
        unsaid={**SILU, "norm_topk_prob": True},
        has_value_heads_in_turns=True,
    ),
}
"""By GGUF's name."""
GRANITE4_DENSE = replace(ARCHITECTURES["granite"], names=GRANITE4_NAMES)
"""Granite 4 without state spaces and experts, which is Granite 3 in GGUF."""


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a file whose name of it is known, or its variant."""
    name = metadata["general.architecture"]
    whole = ARCHITECTURES[name]
    fitting = (found for key, fits, found in whole.variants if fits(metadata.get(f"{name}.{key}", 0)))
    return next(fitting, whole)
