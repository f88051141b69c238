"""Layer norm over the last axis. Next to read: `reference.py`, the definition."""

import torch

from quire.kernels.layer_norm import batched, reference
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import Kernel
from quire.kernels.rms_norm import Norm
from quire.kernels.tracing import SIZES, Call, norm_sizes

KERNEL = Kernel(
    "layer_norm",
    "layer_norm",
    {"reference": reference.layer_norm, "batched": batched.layer_norm},
    preferred={"*": "batched"},
)
SIZES["layer_norm"] = norm_sizes


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Shift each row to mean 0 and scale it to variance 1, then apply `weight` and `bias` where given.

    out[…, i] = (x[…, i] - mean) / sqrt(variance + epsilon) · weight[i] + bias[i]     (Ba et al. 2016)

    Shapes: x [..., E]; weight, bias [E] or None -> [..., E].
    Dtypes: all bf16, fp16 or fp32; sums in fp32; returns x.dtype.
    """
    return KERNEL.on(x.device.type)(x, weight, bias, epsilon)


@lowers("layer_norm")
def _lower(to: Lowering, call: Call) -> None:
    x, weight, bias, epsilon = call.arguments
    out = to.result(call, takes_type=True)
    to.append(Norm(to.columns(x), out, weight, bias, epsilon, True, x.num_columns // x.sizes[-1]))
