"""`RMSNorm` and `LayerNorm`: parameters for the kernels of the same names.

Next to read: `kernels/rms_norm/__init__.py` for the formulas.
"""

import torch
from torch import nn

from quire.kernels.layer_norm import layer_norm
from quire.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """RMS norm over the last axis. Shapes: x [..., size] -> the same; weight [size]."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon)


class LayerNorm(nn.Module):
    """Layer norm over the last axis. Shapes: x [..., size] -> the same; weight, bias [size], or None if not affine."""

    def __init__(self, size: int, epsilon: float, *, affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False) if affine else None
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False) if affine else None
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.epsilon)
