"""Layer norm over the last axis; its instruction is in `rms_norm.py`."""

from functools import partial

from quire.kernels.case import Arguments, Check, random
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.rms_norm import Norm
from quire.kernels.tracing import SIZES, Call, norm_sizes
from quire.lazy_torch import Tensor, functional, torch

SIZES["layer_norm"] = norm_sizes


@kernel
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Shift each row to mean 0 and scale it to variance 1, then apply `weight` and `bias` where given.

    out[…, i] = (x[…, i] - mean) / sqrt(variance + epsilon) · weight[i] + bias[i]     (Ba et al. 2016)

    Shapes: x [..., E]; weight, bias [E] or None -> [..., E].
    Dtypes: all bf16, fp16 or fp32; sums in fp32; returns x.dtype.
    """
    return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


@lowers("layer_norm")
def _lower(to: Lowering, call: Call) -> None:
    x, weight, bias, epsilon = call.arguments
    out = to.result(call, takes_type=True)
    to.append(Norm(to.columns(x), out, weight, bias, epsilon, True, x.num_columns // x.sizes[-1]))


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
