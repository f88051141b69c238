"""Cases of `kernels/linear.py`, and the formulas that it must equal."""

from functools import partial

from quire.kernels.linear import linear
from quire.lazy_torch import Tensor
from tests.kernels.case import Arguments, Check, random


def _formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias


def _make(num_tokens: int, inputs: int, outputs: int, bias: bool = False) -> Arguments:
    weight = random(outputs, inputs, seed=1, scale=inputs**-0.5)
    return {"x": random(num_tokens, inputs), "weight": weight, "bias": random(outputs, seed=2) if bias else None}


CHECKS = (
    Check(
        linear,
        _formula,
        {
            "empty": partial(_make, 0, 64, 32),
            "one row": partial(_make, 1, 576, 960),
            "odd sizes": partial(_make, 33, 67, 35, bias=True),
            "one output": partial(_make, 3, 128, 1),
        },
    ),
)
