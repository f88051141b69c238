"""Rotary position embedding, rotate-half form. Next to read: `reference.py`, the definition."""

import torch

from quire.kernels.registry import Kernel
from quire.kernels.rope import batched, reference

KERNEL = Kernel("rope", "rope", {"reference": reference.rope, "batched": batched.rope}, preferred={"*": "batched"})


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pair (i, i + D/2) of each head by its token's angle of frequency i.

    out[t, h, i]       = x[t, h, i] · cos[t, i] - x[t, h, i + D/2] · sin[t, i]
    out[t, h, i + D/2] = x[t, h, i + D/2] · cos[t, i] + x[t, h, i] · sin[t, i]     for i < D/2     (Su 2021, eq. 34)

    Shapes: x [T, H, D] (may be strided over T); cos, sin [T, D], which hold the D/2 angles twice, and in the first
        half of `sin` with the sign of the formula: sin[t, i] is stored as -sin, sin[t, i + D/2] as +sin.
    Dtypes: x bf16, fp16 or fp32; cos, sin fp32; computed in fp32; returns x.dtype.
    """
    return KERNEL.on(x.device.type)(x, cos, sin)
