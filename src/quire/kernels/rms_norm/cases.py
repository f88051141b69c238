"""Inputs for every version of RMS norm."""

import torch

from quire.kernels.case import Arguments, Case, Check, random
from quire.kernels.rms_norm import KERNEL


def plain(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The formula in x's own dtype."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


def _make(*shape: int, scale: float = 1.0, strided: bool = False) -> Arguments:
    x = random(*shape, scale=scale)
    if strided:
        x = random(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    return {"x": x, "weight": random(shape[-1], seed=1), "epsilon": 1e-5}


CHECKS = (
    Check(
        KERNEL,
        (
            Case("empty", lambda: _make(0, 64)),
            Case("one row", lambda: _make(1, 576)),
            Case("rows", lambda: _make(33, 576)),
            Case("odd width", lambda: _make(5, 67)),
            Case("heads", lambda: _make(7, 3, 128)),
            Case("strided", lambda: _make(9, 96, strided=True)),
            Case("large values", lambda: _make(4, 256, scale=200.0)),
            Case("small values", lambda: _make(4, 256, scale=1e-4)),
        ),
        plain,
    ),
)
