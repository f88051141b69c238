"""Cases of `kernels/layer_norm.py`, and the formulas that it must equal."""

from functools import partial

from quire.kernels.layer_norm import layer_norm
from quire.lazy_torch import Tensor, torch
from tests.kernels.case import Arguments, Check, random


def _formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    out = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + epsilon)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _make(shape: tuple[int, ...], affine: bool = True, offset: float = 0.0) -> Arguments:
    weight, bias = (random(shape[-1], seed=1), random(shape[-1], seed=2)) if affine else (None, None)
    return {"x": random(*shape) + offset, "weight": weight, "bias": bias, "epsilon": 1e-5}


CHECKS = (
    Check(
        layer_norm,
        _formula,
        {
            "empty": partial(_make, (0, 64)),
            "one row": partial(_make, (1, 768)),
            "odd width": partial(_make, (33, 67)),
            "without weight and bias": partial(_make, (5, 64), affine=False),
            "mean far from 0": partial(_make, (5, 64), offset=30.0),
        },
    ),
)
