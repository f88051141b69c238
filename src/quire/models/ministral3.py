"""Ministral 3, its language model: Mistral with YaRN, and queries that grow with the logarithm of their position.

A query at position t is multiplied by 1 + beta · ln(1 + floor(t / original context)). Queries turn by cosines and sines
that have this factor, keys by plain ones. Next to read: `llama.py`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire import nn
from quire.errors import ModelFileError
from quire.kernels.rope import rope
from quire.layers.rotary import RotaryEmbedding, Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader, check_positive, wrong
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_rope import ORIGINAL, parameters_of
from quire.models.llama import LlamaAttention, LlamaForCausalLM

BETA = "llama_4_scaling_beta"
MAX_PERIODS = 1 << 16
"""Original contexts in the context; each is a row of a table."""
RotationOfBoth = tuple[Rotation, Rotation]
"""Of queries and of keys."""


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(LlamaConfig):
    """Llama's fields, with one window. `query_growth`: beta; `query_period`: tokens of the original context."""

    query_growth: float
    query_period: int
    has_window = True
    defaults = {"head_dim": 128, "rms_norm_eps": 1e-5}
    required = {"attention_bias": False, "mlp_bias": False}
    rope_options = {"ignored": (BETA, "max_position_embeddings")}

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        parameters = parameters_of(reader, "rope_scaling") | parameters_of(reader, "rope_parameters")
        if BETA not in parameters:
            raise ModelFileError(f"the model's config lacks {BETA} among its rope parameters")
        fields = super().read(reader)
        period = int(check_positive(ORIGINAL, parameters.get(ORIGINAL, fields["context_len"])))
        if period * MAX_PERIODS < fields["context_len"]:
            raise wrong(ORIGINAL, period, f"at least max_position_embeddings / {MAX_PERIODS}")
        growth = check_positive(BETA, beta) if (beta := parameters[BETA]) != 0 else 0.0
        return fields | {"query_growth": growth, "query_period": period}


class QueryAndKeyRotary(nn.Module):
    """Positions [T] to the rotations of queries and of keys."""

    def __init__(self, config: Ministral3Config) -> None:
        super().__init__()
        num_periods = -(-config.context_len // config.query_period)
        periods = np.arange(num_periods, dtype=np.float64)
        scales = config.rope.attention_factor * (1 + config.query_growth * np.log(1 + periods))
        frequencies = config.rope.frequencies(config.head_size)
        self.of_queries = RotaryEmbedding(frequencies, scales, config.query_period)
        self.of_keys = RotaryEmbedding.of(config.rope, config.head_size)

    def forward(self, positions: Tensor) -> RotationOfBoth:
        """Shapes: positions [T] -> cos, sin [T, D], twice."""
        return self.of_queries(positions), self.of_keys(positions)


class Ministral3Attention(LlamaAttention):
    """Llama's, with queries and keys rotated by different values."""

    def rotate(self, qk: Tensor, rotation: RotationOfBoth) -> tuple[Tensor, Tensor]:
        """Shapes: qk [T, H + K, D] -> [T, H, D], [T, K, D]."""
        q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)  # [T, H, D], [T, K, D]
        of_queries, of_keys = rotation
        return rope(q, *of_queries), rope(k, *of_keys)


class Ministral3ForCausalLM(LlamaForCausalLM):
    """Llama with scaled queries."""

    Config = Ministral3Config
    attention_class = Ministral3Attention

    def build_rotary(self, config: LlamaConfig) -> nn.Module:
        assert isinstance(config, Ministral3Config)
        return QueryAndKeyRotary(config)


ARCHITECTURES = {"Ministral3ForCausalLM": Ministral3ForCausalLM}
