"""Inputs for every version of the linear layer."""

import torch
from torch.nn import functional

from quire.kernels.case import Arguments, Case, Check, random
from quire.kernels.linear import KERNEL


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """PyTorch's own product."""
    return functional.linear(x, weight, bias)


def _make(num_tokens: int, inputs: int, outputs: int, *, bias: bool = False) -> Arguments:
    return {
        "x": random(num_tokens, inputs),
        "weight": random(outputs, inputs, seed=1, scale=inputs**-0.5),
        "bias": random(outputs, seed=2) if bias else None,
    }


CHECKS = (
    Check(
        KERNEL,
        (
            Case("empty", lambda: _make(0, 64, 32)),
            Case("one row", lambda: _make(1, 576, 960)),
            Case("rows", lambda: _make(33, 192, 64)),
            Case("odd sizes", lambda: _make(7, 67, 35, bias=True)),
            Case("bias", lambda: _make(5, 64, 96, bias=True)),
            Case("one output", lambda: _make(3, 128, 1)),
        ),
        plain,
    ),
)
