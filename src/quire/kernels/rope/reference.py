"""Rotary embedding pair by pair, in fp32 (fp64 for fp64 input): the definition of correct."""

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `kernels.rope.rope`."""
    half = cos.shape[-1] // 2
    wide = x if x.dtype == torch.float64 else x.float()
    out = wide.clone()
    for i in range(half):
        cosine, sine = cos[:, i, None].to(wide.dtype), sin[:, half + i, None].to(wide.dtype)  # [T, 1]
        first, second = wide[:, :, i], wide[:, :, half + i]  # [T, H]
        out[:, :, i] = first * cosine - second * sine
        out[:, :, half + i] = second * cosine + first * sine
    return out.to(x.dtype)
