"""RMS norm over the last axis. Next to read: `reference.py`, the definition."""

import torch

from quire.kernels.registry import Kernel
from quire.kernels.rms_norm import batched, native, reference

KERNEL = Kernel(
    "rms_norm",
    "rms_norm",
    {"reference": reference.rms_norm, "batched": batched.rms_norm, "native": native.rms_norm},
    preferred={"cpu": "native", "*": "batched"},
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Scale each row to root mean square 1, then by `weight`.

    out[…, i] = x[…, i] / sqrt(mean_i x[…, i]² + epsilon) · weight[i]     (Zhang & Sennrich 2019)

    Shapes: x [..., E]; weight [E] -> [..., E].
    Dtypes: x, weight bf16, fp16 or fp32; sums in fp32; returns x.dtype.
    """
    return KERNEL.on(x.device.type)(x, weight, epsilon)
