"""Qwen3, dense: Llama with an RMS norm over each head of queries and keys, and a head size of its own.

Next to read: `llama.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.kernels.rope import rope
from quire.layers.group import SINGLE, Group
from quire.layers.norms import RMSNorm
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaAttention, LlamaForCausalLM
from quire.models.qwen2 import read_windows


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Llama's fields, with windows per layer. A head is not hidden size / heads."""

    defaults = {"head_dim": 128}
    required = {"mlp_bias": False}

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        return fields | {"windows": read_windows(reader, fields["num_layers"])}


class Qwen3Attention(LlamaAttention):
    """Llama's, with norms of queries and keys before the rotation."""

    def __init__(self, config: Qwen3Config, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__(config, layer_index, group)
        self.q_norm = RMSNorm(config.head_size, config.rms_norm_epsilon)
        self.k_norm = RMSNorm(config.head_size, config.rms_norm_epsilon)

    def rotate(self, qk: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Shapes: qk [T, H + K, D] -> [T, H, D], [T, K, D]."""
        q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)  # [T, H, D], [T, K, D]
        cos, sin = rotation
        return rope(self.q_norm(q), cos, sin), rope(self.k_norm(k), cos, sin)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with norms of heads."""

    Config = Qwen3Config
    attention_class = Qwen3Attention


ARCHITECTURES = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
