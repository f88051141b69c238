"""A matrix product in fp32 (fp64 for fp64 input): the definition of correct."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `kernels.linear.linear`."""
    plain_weight = weight if weight.layout == torch.strided else weight.to_dense()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.to(wide) @ plain_weight.to(wide).T
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(x.dtype)
