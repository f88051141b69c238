"""Granite 3: Llama with multiples of embeddings, attention scores, residuals and logits.

The multiple r of residuals costs nothing: with x = r · y each sum x + r · f(norm(x)) is y + f(norm(r · y)), and an RMS
norm of r · y with epsilon is one of y with epsilon / r². So y is computed, which starts as embeddings / r.
Next to read: `llama.py`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from quire import nn
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Llama's fields, with multiples. Logits are divided by `logits_divisor`."""

    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        return super().read(reader) | {
            "score_scale": reader.number("attention_multiplier", 1.0),
            "embedding_multiplier": reader.number("embedding_multiplier", 1.0),
            "residual_multiplier": reader.number("residual_multiplier", 1.0),
            "logits_divisor": reader.number("logits_scaling", 1.0),
        }


class GraniteForCausalLM(LlamaForCausalLM):
    """Llama with multiples."""

    Config: ClassVar[type[LlamaConfig]] = GraniteConfig
    config: GraniteConfig

    def build_norm(self, config: LlamaConfig) -> nn.Module:
        """See the module's docstring."""
        assert isinstance(config, GraniteConfig)
        return self.norm_class(config.hidden_size, config.rms_norm_epsilon / config.residual_multiplier**2)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The layers' input, divided by the residuals' multiple. Shapes: token_ids [T] -> [T, E]."""
        return super().embed(token_ids) * (self.config.embedding_multiplier / self.config.residual_multiplier)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, E] -> [S, V]."""
        return super().compute_logits(hidden / self.config.logits_divisor)


ARCHITECTURES = {"GraniteForCausalLM": GraniteForCausalLM}
