"""Hugging Face names for the tensors of a GGUF file, and which of them are stored with their rows in another order.

llama.cpp rotates neighbouring pairs (0, 1), (2, 3), … of a head where Hugging Face rotates (0, D/2), (1, D/2 + 1), …;
its converter therefore reorders the rows of q and k of some architectures, and `rotary_row_order` undoes that.
Must not know metadata or number formats. Next to read: `gguf_architectures.py`.
"""

import functools
import re
from collections.abc import Mapping

import numpy as np

LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "layer_output_scale": "layer_scalar",
}
NAMELESS_NAMES = ("experts.gate_up_proj", "experts.down_proj", "router.scale", "router.per_expert_scale")
"""Hugging Face names of parts that are whole: all experts in one, and vectors of a router."""
NAMELESS_PARTS = ("attn_sinks", "exp_probs_b", "layer_output_scale", "ssm_dt", "ssm_a", "ssm_d")
"""Parts whose Hugging Face names do not end with "weight" or "bias"."""
BARE_PARTS = ("ssm_a", "ssm_d", "ffn_gate_inp.scale", "ffn_down_exps.scale")
"""Parts whose GGUF names do not end with "weight" or "bias"."""
BIASES = ("exp_probs_b", "ssm_dt")
"""Parts that are a bias alone."""
TOP_PARTS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm", "position_embd": "model.embed_positions",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Divisors of the rotary frequencies, which `gguf_rope.py` turns into `rope_scaling`."""
_LAYER_TENSOR = re.compile(
    r"blk\.(0|[1-9][0-9]{0,8})\.(?:(?P<bare>ssm_[ad]|ffn_(?:gate_inp|down_exps)\.scale)|(?P<part>[a-z_]+[0-9]?[a-z_]*(?:\.[a-z_]+)?)\.(?P<kind>weight|bias))",
    re.ASCII,
)
_TOP_TENSOR = re.compile(r"([a-z_]+)\.(weight|bias)", re.ASCII)


def huggingface_name(gguf_name: str, others: Mapping[str, str] | None = None) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that is not known.

    "*" in the result stands for the index of an expert: the tensor has a matrix for each.

    `others`: what the architecture names differently: parts of a layer, of the whole, and "blk", a layer itself.
    """
    others = others or {}
    if match := _LAYER_TENSOR.fullmatch(gguf_name):
        part = match["bare"] or match["part"]
        name = _name_of(part, LAYER_PARTS, others)
        if name is None:
            return None
        layers = others.get("blk", "model.layers")
        return f"{layers}.{match[1]}.{name}" + (
            "" if part in NAMELESS_PARTS or name in NAMELESS_NAMES else f".{match['kind']}"
        )
    if match := _TOP_TENSOR.fullmatch(gguf_name):
        name = _name_of(match[1], TOP_PARTS, others)
        return None if name is None else f"{name}.{match[2]}"
    return None


def _name_of(part: str, usual: Mapping[str, str], others: Mapping[str, str]) -> str | None:
    """The name in `others`, else the usual one, unless another part has that name in `others`."""
    name = others.get(part, usual.get(part))
    return None if part not in others and name in others.values() else name


def predicts_further(gguf_name: str, num_layers: int) -> bool:
    """True for tensors of the layers behind the last, which predict tokens after the next and are not loaded."""
    match = _LAYER_TENSOR.match(gguf_name)
    return match is not None and int(match[1]) >= num_layers


def is_rotary_projection(gguf_name: str) -> bool:
    """True if the rows of this tensor are the query or key heads that RoPE rotates."""
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    return match is not None and match["part"] in ("attn_q", "attn_k")


@functools.lru_cache(maxsize=8)
def rotary_row_order(num_rows: int, head_size: int) -> np.ndarray:
    """The stored position of each row of q or k, in Hugging Face's order, in such a file.

    Row h D + s D/2 + j (head h, half s, pair j) is stored at h D + 2 j + s. Shapes: int64 `[num_rows]`.
    """
    stored = np.arange(num_rows, dtype=np.int64)
    return stored.reshape(-1, head_size // 2, 2).swapaxes(1, 2).reshape(num_rows)
