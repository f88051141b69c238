"""Cases of `kernels/elementwise.py`, and the formulas that it must equal."""

from functools import partial

from quire.kernels.elementwise import gate_rows, join, scale_by, soft_cap
from quire.lazy_torch import torch
from tests.kernels.case import Arguments, Check, random


def _make(*shape: int, scale: float) -> Arguments:
    return {"x": random(*shape, scale=scale), "cap": 30.0}


def _make_rows(num_tokens: int, width: int, num_gates: int = 1) -> Arguments:
    return {"x": random(num_tokens, width), "gates": random(num_tokens, num_gates, seed=1, scale=3.0)}


def _make_scaled(num_tokens: int) -> Arguments:
    return {"x": random(num_tokens, 70), "factor": random(1, seed=1)}


def _make_two(num_tokens: int, width: int, other_width: int) -> Arguments:
    return {"a": random(num_tokens, width), "b": random(num_tokens, other_width, seed=1)}


CHECKS = (
    Check(
        join,
        lambda a, b: torch.stack([*a.unbind(1), *b.unbind(1)], 1),
        {"empty": partial(_make_two, 0, 7, 5), "rows": partial(_make_two, 33, 70, 40)},
    ),
    Check(
        scale_by,
        lambda x, factor: factor * x,
        {"empty": partial(_make_scaled, 0), "rows": partial(_make_scaled, 33)},
    ),
    Check(
        gate_rows,
        lambda x, gates: x / (1 + torch.exp(-gates)),
        {
            "empty": partial(_make_rows, 0, 7),
            "rows": partial(_make_rows, 33, 70),
            "a gate per value": partial(_make_rows, 9, 70, 70),
        },
    ),
    Check(
        soft_cap,
        lambda x, cap: cap * torch.tanh(x / cap),
        {
            "empty": partial(_make, 0, 7, scale=1.0),
            "rows": partial(_make, 33, 70, scale=40.0),
        },
    ),
)
