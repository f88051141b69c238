"""OLMoE: Llama with norms of whole queries and keys, and a mixture of experts in each layer.

Next to read: `olmo2.py`; `layers/experts.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import read_experts
from quire.models.llama import LlamaForCausalLM
from quire.models.olmo2 import OLMo2Attention


@dataclass(frozen=True, kw_only=True)
class OLMoEConfig(LlamaConfig):
    """Llama's fields, `intermediate_size` being an expert's, and experts."""

    defaults = {"rms_norm_eps": 1e-5}
    required = {"mlp_bias": False, "clip_qkv": None}

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        return fields | read_experts(reader, fields) | {"renormalise": reader.flag("norm_topk_prob", False)}


class OLMoEForCausalLM(LlamaForCausalLM):
    """Llama with other norms and experts."""

    Config = OLMoEConfig
    attention_class = OLMo2Attention


ARCHITECTURES = {"OlmoeForCausalLM": OLMoEForCausalLM}
