"""Mixtral: Mistral with a mixture of experts in each layer.

Next to read: `mistral.py`; `layers/experts.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import read_experts
from quire.models.llama import LlamaForCausalLM
from quire.weight_map import Layout


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """Llama's fields, `intermediate_size` being an expert's, with windows and experts."""

    has_window = True
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
    required = {"attention_bias": False, "mlp_bias": False}

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        return fields | read_experts(reader, fields)


class MixtralForCausalLM(LlamaForCausalLM):
    """Llama with experts, whose weights are stored as w1 (gates), w3 (ups) and w2 (downs)."""

    Config = MixtralConfig

    def layout(self) -> Layout:
        """Return Llama's, under other names."""
        names = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        return super().layout() | Layout(renames=names)


ARCHITECTURES = {"MixtralForCausalLM": MixtralForCausalLM}
