"""Recover Llama 3's `rope_scaling` from the factors that llama.cpp's converter stores instead of it.

Must not know files. Next to read: `gguf_config.py`, its only caller.
"""

import math
from typing import Any

import numpy as np

LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_CONTEXT_LEN = 8192
"""Meta's values; every published Llama 3.x has them, and only `factor` varies: 8 in 3.1, 32 in 3.2."""
_TOLERANCE = 1e-4
"""Relative; converters compute the factors in fp32 with other orders of operations."""


def rope_scaling_from_factors(factors: np.ndarray, *, head_size: int, theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` whose divisors of the rotary frequencies are `factors`; None when they are all 1.

    Shapes: factors fp32 `[D / 2]`. Raises: ValueError when no Llama 3 scaling gives them.
    """
    if not np.all(np.isfinite(factors)):
        raise ValueError("the RoPE factors are not finite numbers")
    if np.all(factors == 1):
        return None
    factor = float(str(np.float32(factors.max())))
    expected = llama3_factors(factor, head_size=head_size, theta=theta)
    if not np.allclose(factors, expected, rtol=_TOLERANCE, atol=0):
        raise ValueError("these RoPE factors are not those of Llama 3 scaling, the only kind supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_CONTEXT_LEN,
    }


def llama3_factors(factor: float, *, head_size: int, theta: float) -> np.ndarray:
    """What Llama 3 scaling divides each rotary frequency by.

    1 for wavelengths below 8192 / 4 tokens, `factor` above 8192 / 1, and 1 / ((1 - s) / factor + s) between, where
    s = (8192 / wavelength - 1) / (4 - 1). Shapes: float64 `[D / 2]`.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    smooth = (ORIGINAL_CONTEXT_LEN / wavelengths - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
