"""GLM-4 (0414, dense): Llama with norms around each block and a rotation of neighbouring pairs in half of each head.

Pairs (2j, 2j + 1) are brought to (j, j + C/2), which `rope` rotates, by the order in which the rows of queries and keys
are loaded: their scalar products stay the same. Next to read: `llama.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from quire import nn
from quire.layers.forward_batch import ForwardBatch
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM, LlamaLayer
from quire.weight_map import Layout, Rows


@dataclass(frozen=True, kw_only=True)
class GLM4Config(LlamaConfig):
    """Llama's fields."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    rope_options: ClassVar[Mapping[str, Any]] = {"rotates_part": True}
    required: ClassVar[Mapping[str, Any]] = {"mlp_bias": False}

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        return super().read(reader) | {"output_bias": False}


class GLM4Layer(LlamaLayer):
    """Attention, then MLP, each between two norms and beside a residual."""

    norm_names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    post_self_attn_layernorm: nn.Module
    post_mlp_layernorm: nn.Module

    def attend(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, C] -> [T, E]."""
        return self.post_self_attn_layernorm(super().attend(x, rotation, batch))

    def transform(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.post_mlp_layernorm(super().transform(x))


def halves_from_neighbours(num_heads: int, head_size: int, rotated_size: int) -> np.ndarray:
    """The stored position of each row of queries or keys. Shapes: int64 `[num_heads * head_size]`."""
    rows = np.arange(num_heads * head_size).reshape(num_heads, head_size)
    rotated = rows[:, :rotated_size].reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(num_heads, -1)
    return np.concatenate((rotated, rows[:, rotated_size:]), 1).reshape(-1)


class GLM4ForCausalLM(LlamaForCausalLM):
    """Llama with other norms."""

    Config = GLM4Config
    layer_class = GLM4Layer

    def layout(self) -> Layout:
        """Return Llama's, with the pairs of queries and keys beside each other."""
        config = self.config
        sizes = config.head_size, config.rope.rotated_size(config.head_size)
        return super().layout() | Layout(views={
            r"\.q_proj\.": (Rows(halves_from_neighbours(config.num_heads, *sizes)),),
            r"\.k_proj\.": (Rows(halves_from_neighbours(config.num_kv_heads, *sizes)),),
        })  # fmt: skip


ARCHITECTURES = {"Glm4ForCausalLM": GLM4ForCausalLM}
