"""Activations as their formulas, in fp32 (fp64 for fp64 input): the definition of correct."""

import math

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.activations.silu_and_mul`."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.activations.gelu`."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))).to(x.dtype)


def relu(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.activations.relu`."""
    return torch.where(x > 0, x, torch.zeros_like(x))
