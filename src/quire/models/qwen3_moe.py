"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts, in all layers or in some.

Next to read: `qwen3.py`; `layers/experts.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire import nn
from quire.layers.experts import SparseMLP
from quire.models.hf_config import HFConfigReader
from quire.models.hf_moe import read_experts, read_sparse_layers
from quire.models.qwen3 import Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Qwen3's fields, and experts with `expert_size` MLP columns in the layers of `sparse_layers`."""

    num_experts: int
    top_k: int
    renormalise: bool
    expert_size: int
    sparse_layers: tuple[bool, ...]

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        return fields | read_experts(reader) | {
            "renormalise": reader.flag("norm_topk_prob", False),
            "expert_size": reader.integer("moe_intermediate_size"),
            "sparse_layers": read_sparse_layers(reader, fields["num_layers"]),
        }  # fmt: skip


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with experts."""

    Config = Qwen3MoeConfig
    config: Qwen3MoeConfig

    def build_mlp(self, config: Qwen3MoeConfig, layer_index: int) -> nn.Module:  # type: ignore[override]
        """The experts of one layer, or its MLP."""
        if not config.sparse_layers[layer_index]:
            return super().build_mlp(config, layer_index)
        return SparseMLP(
            config.hidden_size, config.expert_size, config.num_experts, self.group, top_k=config.top_k,
            renormalise=config.renormalise,
        )  # fmt: skip


ARCHITECTURES = {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}
