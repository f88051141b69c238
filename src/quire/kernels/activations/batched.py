"""Activations by PyTorch's vectorised operators: a gate in two calls and one temporary."""

from collections.abc import Callable

import torch
from torch.nn import functional

OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """See `kernels.activations.activate`."""
    return OPERATORS[name](x)


def gate(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """See `kernels.activations.gate`."""
    first, up = gate_up.chunk(2, dim=-1)
    return OPERATORS[name](first).mul_(up)
