"""Inputs for every version of layer norm."""

import torch

from quire.kernels.case import Arguments, Case, Check, random
from quire.kernels.layer_norm import KERNEL


def plain(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """The formula in x's own dtype."""
    centred = x - x.mean(-1, keepdim=True)
    out = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + epsilon)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _make(*shape: int, affine: bool = True, offset: float = 0.0) -> Arguments:
    weight, bias = (random(shape[-1], seed=1), random(shape[-1], seed=2)) if affine else (None, None)
    return {"x": random(*shape) + offset, "weight": weight, "bias": bias, "epsilon": 1e-5}


CHECKS = (
    Check(
        KERNEL,
        (
            Case("empty", lambda: _make(0, 64)),
            Case("one row", lambda: _make(1, 768)),
            Case("rows", lambda: _make(33, 512)),
            Case("odd width", lambda: _make(5, 67)),
            Case("without weight and bias", lambda: _make(5, 64, affine=False)),
            Case("mean far from 0", lambda: _make(5, 64, offset=30.0)),
        ),
        plain,
    ),
)
