"""Gemma 2: Llama with norms around each block, capped scores and logits, GELU gates, a window in every other layer.

Checkpoints store the weights of norms without their 1, which is added when they are loaded. Next to read: `llama.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from quire import nn
from quire.kernels.activations import gelu_tanh_and_mul
from quire.kernels.elementwise import soft_cap
from quire.layers.forward_batch import ForwardBatch
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader, read_window, read_windows
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM, LlamaLayer, LlamaMLP
from quire.weight_map import Layout, Offset

DEFAULT_WINDOW = 4096
Pattern = Callable[[int], bool]


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(LlamaConfig):
    """Llama's fields, with windows per layer. `logit_cap`: None for none."""

    logit_cap: float | None
    defaults = {"head_dim": 256, "tie_word_embeddings": True}
    required = {"use_bidirectional_attention": False, "mlp_bias": False}
    default_caps: ClassVar[tuple[float | None, float | None]] = (50.0, 30.0)
    """Of scores and logits, for a config without these fields; null means none."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        window = read_window(reader, DEFAULT_WINDOW)
        scores, logits = cls.default_caps
        return fields | {
            "score_scale": reader.number("query_pre_attn_scalar", 256) ** -0.5,
            "score_cap": _read_cap(reader, "attn_logit_softcapping", scores),
            "logit_cap": _read_cap(reader, "final_logit_softcapping", logits),
            "windows": read_windows(reader, fields["num_layers"], window, cls.read_pattern(reader)),
        }

    @classmethod
    def read_pattern(cls, reader: HFConfigReader) -> Pattern:
        """Return which layers have a window, by index, where the config does not list them."""
        return lambda index: index % 2 == 0

    @classmethod
    def check_activation(cls, reader: HFConfigReader) -> None:
        """See `LlamaConfig.check_activation`; `hidden_act` is there too, and means nothing."""
        reader.raw("hidden_act")
        reader.choice("hidden_activation", "gelu_pytorch_tanh", ["gelu_pytorch_tanh"])


def _read_cap(reader: HFConfigReader, name: str, default: float | None) -> float | None:
    if reader.raw(name) is None:
        return None if reader.has(name) else default
    return reader.number(name, 0.0)


class Gemma2MLP(LlamaMLP):
    """down(gelu(gate(x)) · up(x))."""

    activation = staticmethod(gelu_tanh_and_mul)


class Gemma2Layer(LlamaLayer):
    """Attention, then MLP, each between two norms and beside a residual."""

    norm_names = (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    def attend(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, D] -> [T, E]."""
        return self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotation, batch))

    def transform(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Llama with other norms, caps and windows."""

    Config: ClassVar[type[LlamaConfig]] = Gemma2Config
    mlp_class = Gemma2MLP
    layer_class = Gemma2Layer
    config: Gemma2Config

    def layout(self) -> Layout:
        """Return Llama's, and norms without their 1."""
        return super().layout() | Layout(views={r"norm\.weight$": (Offset(1.0),)})

    def embed(self, token_ids: Tensor) -> Tensor:
        """The layers' input: embeddings times the square root of their size. Shapes: token_ids [T] -> [T, E]."""
        return super().embed(token_ids) * self.config.hidden_size**0.5

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, E] -> [S, V]."""
        logits, cap = super().compute_logits(hidden), self.config.logit_cap
        return logits if cap is None else soft_cap(logits, cap)


ARCHITECTURES = {"Gemma2ForCausalLM": Gemma2ForCausalLM}
