"""Qwen3.5-MoE, the language model: Qwen3.5 with experts in every layer.

Next to read: `qwen3_5_text.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen3NextConfig):
    """Qwen3-Next's fields; `intermediate_size`, of MLPs that no layer has, is an expert's."""

    required = {
        **Qwen3NextConfig.required, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
    }  # fmt: skip

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        return super().from_hf({"intermediate_size": hf_config.get("moe_intermediate_size", 512), **hf_config})


class Qwen35MoeForCausalLM(Qwen3NextForCausalLM):
    """Delta nets with experts, whose projections are stored apart."""

    Config = Qwen35MoeConfig


ARCHITECTURES = {"Qwen3_5MoeForCausalLM": Qwen35MoeForCausalLM}
