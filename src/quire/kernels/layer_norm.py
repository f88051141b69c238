"""Layer norm over the last axis; its instruction is in `rms_norm.py`."""

from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.rms_norm import Norm
from quire.kernels.tracing import SIZES, Call, norm_sizes
from quire.lazy_torch import Tensor, functional

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
