"""Gemma 4 in GGUF: rows, and what they cannot say, as head size, KV heads and MLP columns differ by layer.

Next to read: `gguf_fields.py`.
"""

import numpy as np

from quire.errors import UnsupportedModelError
from quire.weights import gguf_codecs as codecs
from quire.weights.gguf_codecs import FULL, SLIDING, exact_share
from quire.weights.gguf_fields import Field
from quire.weights.gguf_metadata import Metadata
from quire.weights.gguf_names import ROPE_FACTORS
from quire.weights.gguf_rope import read_factors

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
