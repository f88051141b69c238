"""Inputs for every version of the activations."""

import torch

from quire.kernels.activations import ACTIVATE, GATE
from quire.kernels.activations.reference import FORMULAS
from quire.kernels.case import Case, Check, random


def plain_gate(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """The formula in the input's own dtype."""
    first, up = gate_up.chunk(2, -1)
    return FORMULAS[name](first) * up


def plain_activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """The formula in the input's own dtype."""
    return FORMULAS[name](x)


def _cases(argument: str) -> tuple[Case, ...]:
    shapes = {"empty": (0, 64), "one row": (1, 3072), "rows": (33, 192), "odd width": (5, 134)}
    sizes = [(f"silu, {name}", "silu", shape, 1.0) for name, shape in shapes.items()]
    functions = [(f"{name}, large values", name, (7, 66), 5.0) for name in FORMULAS]
    return tuple(
        Case(title, lambda name=name, shape=shape, scale=scale: {argument: random(*shape, scale=scale), "name": name})  # type: ignore[misc]
        for title, name, shape, scale in (*sizes, *functions)
    )


CHECKS = (Check(GATE, _cases("gate_up"), plain_gate), Check(ACTIVATE, _cases("x"), plain_activate))
