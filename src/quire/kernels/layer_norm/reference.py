"""Layer norm as written in the paper, in fp32 (fp64 for fp64 input): the definition of correct."""

import torch


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """See `kernels.layer_norm.layer_norm`."""
    wide = x if x.dtype == torch.float64 else x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    out = centred / torch.sqrt(variance + epsilon)
    if weight is not None:
        out = out * weight.to(wide.dtype)
    if bias is not None:
        out = out + bias.to(wide.dtype)
    return out.to(x.dtype)
