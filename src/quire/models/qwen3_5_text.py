"""Qwen3.5, dense, the language model: gated delta nets beside gated attention, with an MLP in every layer.

Next to read: `qwen3_next.py`.
"""

from quire.models.qwen3_next import DeltaNetForCausalLM


class Qwen35ForCausalLM(DeltaNetForCausalLM):
    """Delta nets whose projections are stored apart."""


ARCHITECTURES = {"Qwen3_5ForCausalLM": Qwen35ForCausalLM}
