"""Qwen3.5-MoE, the language model: Qwen3.5 with experts in every layer.

Next to read: `qwen3_5_text.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.hf_config import HFConfigReader
from quire.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen3NextConfig):
    """Qwen3-Next's fields; `intermediate_size`, of MLPs that no layer has, is an expert's."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        return super().from_hf({"intermediate_size": hf_config.get("moe_intermediate_size", 512), **hf_config})

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        """See `LlamaConfig.read`."""
        reader.require("norm_topk_prob", True)
        reader.require("mlp_only_layers", [])
        reader.require("decoder_sparse_step", 1)
        return super().read(reader)


class Qwen35MoeForCausalLM(Qwen3NextForCausalLM):
    """Delta nets with experts, whose projections are stored apart."""

    Config = Qwen35MoeConfig


ARCHITECTURES = {"Qwen3_5MoeForCausalLM": Qwen35MoeForCausalLM}
