"""OLMo 2: Llama with norms behind each block instead of before it, and norms of whole queries and keys.

Next to read: `llama.py`.
"""

from dataclasses import dataclass

from quire import nn
from quire.kernels.rope import rope
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, share_heads
from quire.layers.norms import SharedRMSNorm
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


@dataclass(frozen=True, kw_only=True)
class OLMo2Config(LlamaConfig):
    """Llama's fields."""

    defaults = {"rms_norm_eps": 1e-5}
    required = {"mlp_bias": False}


class OLMo2Attention(LlamaAttention):
    """Llama's, with a norm over all queries of a token and one over all its keys, before the rotation."""

    def __init__(self, config: OLMo2Config, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__(config, layer_index, group)
        heads, kv_heads = share_heads(config.num_heads, config.num_kv_heads, group)
        self.q_norm = SharedRMSNorm(heads * config.head_size, config.rms_norm_epsilon, group)
        self.k_norm = SharedRMSNorm(kv_heads * config.head_size, config.rms_norm_epsilon, group)

    def rotate(self, qk: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Shapes: qk [T, H + K, D] -> [T, H, D], [T, K, D]."""
        q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)  # [T, H, D], [T, K, D]
        q = self.q_norm(q.flatten(1)).view(-1, self.num_heads, self.head_size)
        k = self.k_norm(k.flatten(1)).view(-1, self.num_kv_heads, self.head_size)
        return rope(q, *rotation), rope(k, *rotation)


class OLMo2Layer(LlamaLayer):
    """Attention, then MLP, each with a norm behind it and beside a residual."""

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")
    post_feedforward_layernorm: nn.Module

    def attend(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, D] -> [T, E]."""
        return self.post_attention_layernorm(self.self_attn(x, rotation, batch))

    def transform(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.post_feedforward_layernorm(self.mlp(x))


class OLMo2ForCausalLM(LlamaForCausalLM):
    """Llama with other norms."""

    Config = OLMo2Config
    attention_class = OLMo2Attention
    layer_class = OLMo2Layer


ARCHITECTURES = {"Olmo2ForCausalLM": OLMo2ForCausalLM}
