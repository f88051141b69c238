"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts, in all layers or in some.

Next to read: `qwen3.py`; `layers/experts.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.models.hf_config import HFConfigReader
from quire.models.hf_moe import read_moe
from quire.models.qwen3 import Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Qwen3's fields, and experts."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        return fields | read_moe(reader, fields)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with experts."""

    Config = Qwen3MoeConfig


ARCHITECTURES = {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}
