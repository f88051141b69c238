"""Activations of the MLP. Next to read: `reference.py`, the definitions."""

import torch

from quire.kernels.activations import batched, reference
from quire.kernels.registry import Kernel

SILU_AND_MUL = Kernel(
    "activations",
    "silu_and_mul",
    {"reference": reference.silu_and_mul, "batched": batched.silu_and_mul},
    preferred={"*": "batched"},
)
GELU = Kernel("activations", "gelu", {"reference": reference.gelu, "batched": batched.gelu}, preferred={"*": "batched"})
RELU = Kernel("activations", "relu", {"reference": reference.relu, "batched": batched.relu}, preferred={"*": "batched"})


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row by SiLU of the first.

    out[…, i] = g / (1 + exp(-g)) · u, with g = gate_up[…, i], u = gate_up[…, F + i]     (Shazeer 2020, SwiGLU)

    Shapes: gate_up [..., 2F] -> [..., F].
    Dtypes: bf16, fp16 or fp32, returned the same.
    """
    return SILU_AND_MUL.on(gate_up.device.type)(gate_up)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Exact GELU: out = x · Φ(x), Φ the normal distribution function.     (Hendrycks & Gimpel 2016)

    Shapes: any -> the same. Dtypes: bf16, fp16 or fp32, returned the same.
    """
    return GELU.on(x.device.type)(x)


def relu(x: torch.Tensor) -> torch.Tensor:
    """out = max(x, 0).

    Shapes: any -> the same. Dtypes: bf16, fp16 or fp32, returned the same.
    """
    return RELU.on(x.device.type)(x)
