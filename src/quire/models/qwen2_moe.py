"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with mixtures of experts, beside an expert that all tokens use.

Next to read: `qwen2.py`; `layers/experts.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from quire.kernels.elementwise import gate_rows
from quire.layers.experts import Router
from quire.layers.group import Group, PartOfSum
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import MoE, read_moe
from quire.models.llama import LlamaMLP
from quire.models.qwen2 import Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(Qwen2Config):
    """Qwen2's fields, and experts."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        has_bias, fields = reader.flag("qkv_bias", True), super().read(reader)
        shared_size = reader.integer("shared_expert_intermediate_size")
        return fields | read_moe(reader, fields) | {"qkv_bias": has_bias, "shared_size": shared_size}


class GatedSharedMoE(MoE):
    """Experts, and an MLP for all tokens that is multiplied by the sigmoid of one value of the token."""

    def __init__(self, config: LlamaConfig, group: Group) -> None:
        part = PartOfSum(group.rank, group.size)
        super().__init__(config, part)
        self.shared_expert = LlamaMLP(replace(config, intermediate_size=config.shared_size), part)
        self.group = group
        self.shared_expert_gate = Router(config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        shared = gate_rows(self.shared_expert(x), self.shared_expert_gate(x))
        return self.group.all_reduce(super().forward(x) + shared)


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with experts."""

    Config = Qwen2MoeConfig
    moe_class = GatedSharedMoE


ARCHITECTURES = {"Qwen2MoeForCausalLM": Qwen2MoeForCausalLM}
