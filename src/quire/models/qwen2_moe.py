"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with mixtures of experts, beside an expert that all tokens use.

Next to read: `qwen2.py`; `layers/experts.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from quire import nn
from quire.kernels.elementwise import gate_rows
from quire.layers.experts import Router, SparseMLP
from quire.layers.group import Group, PartOfSum
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader
from quire.models.hf_moe import read_experts, read_sparse_layers
from quire.models.llama import LlamaMLP
from quire.models.qwen2 import Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(Qwen2Config):
    """Qwen2's fields, and experts with `expert_size` MLP columns in the layers of `sparse_layers`.

    `shared_size`: MLP columns of the shared expert.
    """

    num_experts: int
    top_k: int
    renormalise: bool
    expert_size: int
    shared_size: int
    sparse_layers: tuple[bool, ...]

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        has_bias, fields = reader.flag("qkv_bias", True), super().read(reader)
        return fields | read_experts(reader) | {
            "qkv_bias": has_bias,
            "renormalise": reader.flag("norm_topk_prob", False),
            "expert_size": reader.integer("moe_intermediate_size"),
            "shared_size": reader.integer("shared_expert_intermediate_size"),
            "sparse_layers": read_sparse_layers(reader, fields["num_layers"]),
        }  # fmt: skip


class SharedSparseMLP(SparseMLP):
    """Experts, and an MLP for all tokens that is multiplied by the sigmoid of one value of the token."""

    def __init__(self, config: Qwen2MoeConfig, group: Group) -> None:
        part = PartOfSum(group.rank, group.size)
        super().__init__(
            config.hidden_size, config.expert_size, config.num_experts, part, top_k=config.top_k,
            renormalise=config.renormalise,
        )  # fmt: skip
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

    def build_mlp(self, config: Qwen2MoeConfig, layer_index: int) -> nn.Module:  # type: ignore[override]
        """The experts of one layer, or its MLP."""
        if not config.sparse_layers[layer_index]:
            return super().build_mlp(config, layer_index)
        return SharedSparseMLP(config, self.group)


ARCHITECTURES = {"Qwen2MoeForCausalLM": Qwen2MoeForCausalLM}
