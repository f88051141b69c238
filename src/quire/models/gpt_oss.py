"""gpt-oss: Llama with attention sinks, a window in every other layer, and a mixture of experts with clamped gates.

Next to read: `llama.py`; `layers/experts.py`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire import nn
from quire.kernels.experts import ALPHA, CLAMPED, LIMIT
from quire.layers.group import SINGLE, Group, Partition, share_heads
from quire.models.hf_config import HFConfigReader, read_windows
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import MoE, read_experts
from quire.models.llama import LlamaAttention, LlamaForCausalLM
from quire.weight_map import Layout, Rows, Transpose


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(LlamaConfig):
    """Llama's fields, `intermediate_size` being an expert's, with windows and experts."""

    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True}
    required = {"mlp_bias": False, "swiglu_alpha": ALPHA, "swiglu_limit": LIMIT}
    unused = ("quantization_config", "initial_context_length", "experts_per_token")
    """The tensors' formats tell of quantisation."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields, window = super().read(reader), reader.optional_integer("sliding_window")
        windows = read_windows(reader, fields["num_layers"], window, lambda index: index % 2 == 0)
        return fields | read_experts(reader, fields) | {"windows": windows}


class GptOssAttention(LlamaAttention):
    """Llama's, with a learned score per head that takes part in the softmax and has no value."""

    def __init__(self, config: GptOssConfig, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__(config, layer_index, group)
        heads, _ = share_heads(config.num_heads, config.num_kv_heads, group)
        self.sinks: Any = nn.Parameter(nn.empty(heads.size))
        self.partitions = {"sinks": Partition(rows=(heads,))}


class GptOssMoE(MoE):
    """Experts with biases, and gates and ups that are clamped."""

    activation = CLAMPED
    bias = True


class GptOssForCausalLM(LlamaForCausalLM):
    """Llama with sinks and experts, whose gates and ups are stored row by row in turns."""

    Config = GptOssConfig
    attention_class = GptOssAttention
    moe_class = GptOssMoE

    def layout(self) -> Layout:
        """Return Llama's, with stacks of matrices whose inputs are rows unless they are quantised."""
        gates_first = np.arange(2 * self.config.intermediate_size).reshape(-1, 2).T.reshape(-1)
        return super().layout() | Layout(
            renames={"router": "gate"},
            views={
                r"\.experts\.(gate_up|down)_proj$": (Transpose(floats_only=True),),
                r"\.experts\.gate_up_proj(_bias)?$": (Rows(gates_first),),
            },
        )


ARCHITECTURES = {"GptOssForCausalLM": GptOssForCausalLM}
