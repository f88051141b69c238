"""GLM-4 (0414, dense): Llama with norms around each block and a rotation of neighbouring pairs in half of each head.

Pairs (2j, 2j + 1) are brought to (j, j + C/2), which `rope` rotates, by the order in which the rows of queries and keys
are loaded: their scalar products stay the same. Next to read: `llama.py`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.models.gemma2 import Gemma2Layer
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM
from quire.weight_map import Layout, Rows


@dataclass(frozen=True, kw_only=True)
class GLM4Config(LlamaConfig):
    """Llama's fields."""

    defaults = {
        "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    rope_options = {"rotates_part": True}
    required = {"mlp_bias": False}

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        return super().read(reader) | {"output_bias": False}


def halves_from_neighbours(num_heads: int, head_size: int, rotated_size: int) -> np.ndarray:
    """The stored position of each row of queries or keys. Shapes: int64 `[num_heads * head_size]`."""
    rows = np.arange(num_heads * head_size).reshape(num_heads, head_size)
    rotated = rows[:, :rotated_size].reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(num_heads, -1)
    return np.concatenate((rotated, rows[:, rotated_size:]), 1).reshape(-1)


class GLM4ForCausalLM(LlamaForCausalLM):
    """Llama with other norms."""

    Config = GLM4Config
    layer_class = Gemma2Layer

    def layout(self) -> Layout:
        """Return Llama's, with the pairs of queries and keys beside each other, and Gemma 2's norms by other names."""
        config = self.config
        sizes = config.head_size, config.rope.rotated_size(config.head_size)
        views = {
            r"\.q_proj\.": (Rows(halves_from_neighbours(config.num_heads, *sizes)),),
            r"\.k_proj\.": (Rows(halves_from_neighbours(config.num_kv_heads, *sizes)),),
        }
        renames = {
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        }
        return super().layout() | Layout(views=views, renames=renames)


ARCHITECTURES = {"Glm4ForCausalLM": GLM4ForCausalLM}
