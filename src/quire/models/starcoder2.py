"""StarCoder2: Llama with layer norms, biases, a plain MLP with GELU, and a window.

Next to read: `llama.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire import nn
from quire.kernels.activations import activate
from quire.layers.group import SINGLE, Group, share
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norms import LayerNorm
from quire.lazy_torch import Tensor
from quire.models.hf_config import ACTIVATIONS, HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class StarCoder2Config(LlamaConfig):
    """Llama's fields, with one bias for all layers; `rms_norm_epsilon` is that of the layer norms."""

    activation: str
    defaults: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": True}
    required: ClassVar[Mapping[str, Any]] = {"mlp_type": "default", "norm_type": "layer_norm"}
    unused = ("residual_dropout", "embedding_dropout", "layer_norm_epsilon", "activation_function")
    """Dropout, and names of StarCoder 1 beside those that count."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        bias = reader.flag("use_bias", True)
        for name in ("attention_bias", "mlp_bias"):
            reader.require(name, bias)
        fields = super().read(reader)
        return fields | {
            "activation": ACTIVATIONS[reader.choice("hidden_act", "gelu_pytorch_tanh", tuple(ACTIVATIONS))],
            "rms_norm_epsilon": reader.number("norm_epsilon", 1e-5),
            "windows": (reader.optional_integer("sliding_window"),) * fields["num_layers"],
            "qkv_bias": bias, "output_bias": bias, "mlp_bias": bias,
        }  # fmt: skip

    @classmethod
    def check_activation(cls, reader: HFConfigReader) -> None:
        """Nothing to check: `read` reads the activation."""


class StarCoder2MLP(nn.Module):
    """c_proj(activation(c_fc(x))), F wide on this rank."""

    def __init__(self, config: StarCoder2Config, group: Group = SINGLE) -> None:
        super().__init__()
        inner = share("MLP columns", config.intermediate_size, group)
        self.activation = config.activation
        self.c_fc = ColumnParallelLinear(config.hidden_size, (inner,), bias=config.mlp_bias)
        self.c_proj = RowParallelLinear(inner, config.hidden_size, group, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.c_proj(activate(self.c_fc(x), self.activation))  # [T, F] -> [T, E]


class StarCoder2ForCausalLM(LlamaForCausalLM):
    """Llama with layer norms and another MLP."""

    Config = StarCoder2Config
    mlp_class = StarCoder2MLP
    norm_class = LayerNorm


ARCHITECTURES = {"Starcoder2ForCausalLM": StarCoder2ForCausalLM}
