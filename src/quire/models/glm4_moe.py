"""GLM-4.5 and GLM-4.6: Llama with a rotated half of each head, norms of heads or none, and DeepSeek-V3's experts.

The layer that predicts further tokens is a `Predictor`. Next to read: `llama.py`; `deepseek_v2.py` for shared experts.
"""

from dataclasses import dataclass, replace
from typing import Any

from quire import nn
from quire.models.deepseek_v2 import SharedMoE
from quire.models.hf_config import HFConfigReader
from quire.models.hf_deepseek import read_groups, read_routed_experts
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaAttention, LlamaForCausalLM
from quire.models.qwen3 import Qwen3Attention


@dataclass(frozen=True, kw_only=True)
class GLM4MoeConfig(LlamaConfig):
    """Llama's fields, and whether queries and keys have norms."""

    has_head_norms: bool
    defaults = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}
    rope_options = {"rotates_part": True}
    required = {"mlp_bias": False}

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        experts = read_routed_experts(reader, fields, 1, 1, 1, "num_local_experts")
        factor = reader.number("routed_scaling_factor", 1.0)
        return (
            fields
            | experts
            | {
                "output_bias": False,
                "has_head_norms": reader.flag("use_qk_norm", False),
                "renormalise": reader.flag("norm_topk_prob", True),
                "scoring": replace(read_groups(reader, experts, 1, 1), is_sigmoid=True, factor=factor, group_best=2),
            }
        )


class GLM4MoeForCausalLM(LlamaForCausalLM):
    """Llama with experts beside shared ones in all but the first layers."""

    Config = GLM4MoeConfig
    moe_class = SharedMoE
    config: GLM4MoeConfig

    def build_attention(self, config: LlamaConfig, layer_index: int) -> nn.Module:
        """Qwen3's, with norms of heads, or Llama's."""
        kind = Qwen3Attention if self.config.has_head_norms else LlamaAttention
        return kind(config, layer_index, self.group)  # type: ignore[arg-type]  # it reads Llama's fields


ARCHITECTURES = {"Glm4MoeForCausalLM": GLM4MoeForCausalLM}
