import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.weights.rope_factors import llama3_factors, rope_scaling_from_factors


@pytest.mark.parametrize(("factor", "head_size", "theta"), [(8.0, 128, 500000.0), (32.0, 64, 500000.0), (4.0, 64, 1e4)])
def test_factors_divide_the_frequencies_of_transformers(factor: float, head_size: int, theta: float) -> None:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": theta,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=head_size, num_attention_heads=1, head_dim=head_size, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / theta ** (np.arange(0, head_size, 2) / head_size)
    factors = llama3_factors(factor, head_size=head_size, theta=theta)
    assert np.allclose(plain / factors, scaled.double().numpy(), rtol=1e-5)

    recovered = rope_scaling_from_factors(factors.astype(np.float32), head_size=head_size, theta=theta)
    del scaling["rope_theta"]
    assert recovered == scaling


def test_ones_mean_no_scaling() -> None:
    assert rope_scaling_from_factors(np.ones(32, np.float32), head_size=64, theta=1e4) is None


@pytest.mark.parametrize("bad", [2.0, 0.5, -1.0, 0.0, math.nan, math.inf])
def test_other_factors_are_refused(bad: float) -> None:
    factors = llama3_factors(8.0, head_size=64, theta=500000.0).astype(np.float32)
    factors[3] = bad
    with pytest.raises(ValueError, match="RoPE factors"):
        rope_scaling_from_factors(factors, head_size=64, theta=500000.0)
