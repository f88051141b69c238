"""Layer norm by PyTorch's own operator: one call instead of eight."""

import torch
from torch.nn import functional


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """See `kernels.layer_norm.layer_norm`."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)
