"""Activations as their formulas, in fp32 (fp64 for fp64 input): the definition of correct."""

import math
from collections.abc import Callable

import torch

FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "relu2": lambda x: torch.where(x > 0, x * x, torch.zeros_like(x)),
}


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """See `kernels.activations.activate`."""
    wide = x if x.dtype == torch.float64 else x.float()
    return FORMULAS[name](wide).to(x.dtype)


def gate(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """See `kernels.activations.gate`."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    first, up = wide.chunk(2, dim=-1)
    return (FORMULAS[name](first) * up).to(gate_up.dtype)
