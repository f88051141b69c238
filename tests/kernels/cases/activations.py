"""Cases of `kernels/activations.py`, and the formulas that it must equal."""

import math
from collections.abc import Callable, Mapping
from functools import partial

from quire.kernels.activations import Function, activate, gate
from quire.lazy_torch import Tensor, torch
from tests.kernels.case import Arguments, Check, random

FORMULAS: dict[str, Function] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "relu2": lambda x: torch.where(x > 0, x * x, torch.zeros_like(x)),
}


def _gate_formula(gate_up: Tensor, name: str) -> Tensor:
    first, up = gate_up.chunk(2, -1)
    return FORMULAS[name](first) * up


def _make(argument: str, name: str = "silu", shape: tuple[int, int] = (7, 66), scale: float = 1.0) -> Arguments:
    return {argument: random(*shape, scale=scale), "name": name}


def _cases(argument: str) -> Mapping[str, Callable[[], Arguments]]:
    make = partial(_make, argument)
    sizes = {"empty": (0, 64), "one row": (1, 3072), "odd width": (33, 134)}
    return {name: partial(make, shape=shape) for name, shape in sizes.items()} | {
        f"{name}, large values": partial(make, name, scale=5.0) for name in FORMULAS
    }


CHECKS = (
    Check(gate, _gate_formula, _cases("gate_up")),
    Check(activate, lambda x, name: FORMULAS[name](x), _cases("x")),
)
