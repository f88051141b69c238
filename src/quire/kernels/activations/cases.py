"""Inputs for every version of the activations."""

import math

import torch

from quire.kernels.activations import GELU, RELU, SILU_AND_MUL
from quire.kernels.case import Arguments, Case, Check, random


def plain_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula in the input's own dtype."""
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def plain_gelu(x: torch.Tensor) -> torch.Tensor:
    """The formula in the input's own dtype."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _gate_up(*shape: int, scale: float = 1.0) -> Arguments:
    return {"gate_up": random(*shape, scale=scale)}


def _x(*shape: int, scale: float = 1.0) -> Arguments:
    return {"x": random(*shape, scale=scale)}


SHAPES = {"empty": (0, 64), "one row": (1, 3072), "rows": (33, 192), "odd width": (5, 134)}

CHECKS = (
    Check(
        SILU_AND_MUL,
        (
            *(Case(name, lambda shape=shape: _gate_up(*shape)) for name, shape in SHAPES.items()),  # type: ignore[misc]
            Case("large values", lambda: _gate_up(4, 64, scale=30.0)),
        ),
        plain_silu_and_mul,
    ),
    Check(
        GELU,
        tuple(Case(name, lambda shape=shape: _x(*shape)) for name, shape in SHAPES.items()),  # type: ignore[misc]
        plain_gelu,
    ),
    Check(
        RELU,
        tuple(Case(name, lambda shape=shape: _x(*shape)) for name, shape in SHAPES.items()),  # type: ignore[misc]
        None,
    ),
)
