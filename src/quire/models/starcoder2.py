"""StarCoder2: Llama with layer norms, biases, a plain MLP with GELU, and a window.

Next to read: `llama.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.layers.norms import LayerNorm
from quire.models.gpt2 import PlainMLP
from quire.models.hf_config import ACTIVATIONS, HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class StarCoder2Config(LlamaConfig):
    """Llama's fields, with one bias for all layers; `rms_norm_epsilon` is that of the layer norms."""

    activation: str
    has_window = True
    defaults = {"tie_word_embeddings": True}
    required = {"mlp_type": "default", "norm_type": "layer_norm"}
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
            "qkv_bias": bias,
            "output_bias": bias,
            "mlp_bias": bias,
        }

    @classmethod
    def check_activation(cls, reader: HFConfigReader) -> None:
        """Nothing to check: `read` reads the activation."""


class StarCoder2ForCausalLM(LlamaForCausalLM):
    """Llama with layer norms and another MLP."""

    Config = StarCoder2Config
    mlp_class = PlainMLP
    norm_class = LayerNorm


ARCHITECTURES = {"Starcoder2ForCausalLM": StarCoder2ForCausalLM}
