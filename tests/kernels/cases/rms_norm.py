"""Cases of `kernels/rms_norm.py`, and the formulas that it must equal."""

from functools import partial

from quire.kernels.rms_norm import rms_norm
from quire.lazy_torch import Tensor, torch
from tests.kernels.case import Arguments, Check, random


def _formula(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    normal = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon)
    if weight is None:
        return normal
    return normal * (weight if len(weight) == x.shape[-1] else weight.view(x.shape[-2:]))


def _make(shape: tuple[int, ...], scale: float = 1.0, strided: bool = False, weights: int = 1) -> Arguments:
    x = random(*shape[:-1], 2 * shape[-1], scale=scale)[..., : shape[-1]] if strided else random(*shape, scale=scale)
    return {"x": x, "weight": random(weights * shape[-1], seed=1) if weights else None, "epsilon": 1e-5}


CHECKS = (
    Check(
        rms_norm,
        _formula,
        {
            "empty": partial(_make, (0, 64)),
            "one row": partial(_make, (1, 576)),
            "odd width": partial(_make, (33, 67)),
            "heads": partial(_make, (7, 3, 128)),
            "heads without weights": partial(_make, (7, 3, 20), weights=0),
            "groups with weights of their own": partial(_make, (5, 3, 20), weights=3),
            "strided": partial(_make, (9, 96), strided=True),
            "large values": partial(_make, (4, 256), scale=200.0),
        },
    ),
)
