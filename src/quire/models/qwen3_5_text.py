"""Qwen3.5, dense, the language model: gated delta nets beside gated attention, with an MLP in every layer.

Next to read: `qwen3_next.py`.
"""

from collections.abc import Mapping
from typing import ClassVar

from quire.models.llama import LlamaForCausalLM
from quire.models.qwen3_next import DeltaNetForCausalLM

STACKED_PARAMS = {
    **LlamaForCausalLM.stacked_params,
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_a", "in_proj_b"),
}


class Qwen35ForCausalLM(DeltaNetForCausalLM):
    """Delta nets whose projections are stored apart."""

    stacked_params: ClassVar[Mapping[str, tuple[str, ...]]] = STACKED_PARAMS


ARCHITECTURES = {"Qwen3_5ForCausalLM": Qwen35ForCausalLM}
