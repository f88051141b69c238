"""Mixtral: Mistral with a mixture of experts in each layer.

Next to read: `mistral.py`; `layers/experts.py`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from quire.layers.experts import SparseMLP, stacked_experts
from quire.layers.group import SINGLE, Group
from quire.layers.rotary import RopeConfig
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import read_experts
from quire.models.hf_rope import read_rope
from quire.models.llama import LlamaForCausalLM

DEFAULT_THETA = 1e6


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """Llama's fields, `intermediate_size` being an expert's, with windows and experts."""

    num_experts: int
    top_k: int

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        """See `LlamaConfig.read`."""
        reader.require("attention_bias", False)
        reader.require("mlp_bias", False)
        fields = super().read(reader)
        return fields | read_experts(reader) | {
            "rms_norm_epsilon": reader.number("rms_norm_eps", 1e-5),
            "windows": (reader.optional_integer("sliding_window"),) * fields["num_layers"],
        }  # fmt: skip

    @classmethod
    def read_rope(cls, reader: HFConfigReader) -> RopeConfig:
        """See `LlamaConfig.read_rope`."""
        return read_rope(reader, theta=DEFAULT_THETA)


class MixtralForCausalLM(LlamaForCausalLM):
    """Llama with experts, whose weights are stored as w1 (gates), w3 (ups) and w2 (downs)."""

    Config = MixtralConfig
    renamed_segments: ClassVar[dict[str, str]] = {
        "block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
    }  # fmt: skip

    def __init__(self, config: MixtralConfig, group: Group = SINGLE) -> None:
        super().__init__(config, group)
        stacked = {**stacked_experts(config.num_experts), **type(self).stacked_params}
        self.stacked_params = stacked  # type: ignore[misc]  # depends on the number of experts

    def build_mlp(self, config: MixtralConfig, layer_index: int) -> nn.Module:  # type: ignore[override]
        """The experts of one layer."""
        return SparseMLP(
            config.hidden_size, config.intermediate_size, config.num_experts, self.group, top_k=config.top_k,
            renormalise=True,
        )  # fmt: skip


ARCHITECTURES = {"MixtralForCausalLM": MixtralForCausalLM}
