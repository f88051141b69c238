"""Phi-3 and Phi-4 (mini and 14B): Llama with fused projections as they are stored, and LongRoPE on a part of each head.

Next to read: `llama.py`.
"""

from dataclasses import dataclass

from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class Phi3Config(LlamaConfig):
    """Llama's fields, with one window in all layers."""

    has_window = True
    required = {
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), False),
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    }
    unused = ("resid_pdrop", "embd_pdrop")
    rope_options = {
        "rotates_part": True,
        "default_original": 4096,
        "renames": {"su": "longrope", "yarn": "longrope"},
    }
    """Early configs have other names of LongRoPE."""


class Phi3ForCausalLM(LlamaForCausalLM):
    """Llama whose checkpoints have `qkv_proj` and `gate_up_proj` in one piece."""

    Config = Phi3Config


ARCHITECTURES = {"Phi3ForCausalLM": Phi3ForCausalLM}
