"""`RMSNorm`, `SharedRMSNorm` and `LayerNorm`: parameters for the kernels of the same names.

Next to read: `kernels/rms_norm.py` for the formulas.
"""

from quire import nn
from quire.kernels.layer_norm import layer_norm
from quire.kernels.rms_norm import rms_norm
from quire.kernels.tracing import Symbol
from quire.layers.group import Group, Partition, Share
from quire.lazy_torch import Tensor, torch


class RMSNorm(nn.Module):
    """RMS norm over the last axis. Shapes: x [..., size] -> the same; weight [size]."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.empty(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


class SharedRMSNorm(RMSNorm):
    """RMS norm of a vector that the ranks hold in parts, as all queries of a token.

    Several ranks may hold the same part, if all parts are held by equally many.
    Shapes: x [T, size of this rank's part] -> the same.
    """

    def __init__(self, part: Share, epsilon: float, group: Group) -> None:
        super().__init__(part.size, epsilon)
        self.group = group
        self.partitions = {"weight": Partition(rows=(part,))}

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return super().forward(x)
        if isinstance(x, Symbol):
            return x.trace.record("shared_norm", (x, self.weight, self.epsilon), x.sizes)
        mean = self.group.all_reduce(x.float().square().mean(-1, keepdim=True)) / self.group.size  # [T, 1]
        return (x.float() * torch.rsqrt(mean + self.epsilon)).to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """Layer norm over the last axis. Shapes: x [..., size] -> the same; weight, bias [size], or None if not affine."""

    def __init__(self, size: int, epsilon: float, *, affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.empty(size)) if affine else None
        self.bias = nn.Parameter(nn.empty(size)) if affine else None
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.epsilon)
