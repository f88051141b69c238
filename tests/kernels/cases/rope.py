"""Cases of `kernels/rope.py`, and the formulas that it must equal."""

from functools import partial

from quire.kernels.rope import rope
from quire.lazy_torch import Tensor, torch
from tests.kernels.case import Arguments, Check, random


def _formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out, half = x.clone(), cos.shape[-1] // 2
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    for i in range(half):
        first, second = x[:, :, i], x[:, :, half + i]  # [T, H]
        out[:, :, i] = first * cos[:, i, None] - second * sin[:, half + i, None]
        out[:, :, half + i] = second * cos[:, i, None] + first * sin[:, half + i, None]
    return out


def _make(num_tokens: int, heads: int, head_size: int, first: int = 0, rotated: int | None = None) -> Arguments:
    size = head_size if rotated is None else rotated
    angles = torch.arange(first, first + num_tokens)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    return {
        "x": random(num_tokens, heads + 3, head_size)[:, :heads],
        "cos": torch.cat((angles.cos(), angles.cos()), -1),
        "sin": torch.cat((-angles.sin(), angles.sin()), -1),
    }


CHECKS = (
    Check(
        rope,
        _formula,
        {
            "empty": partial(_make, 0, 2, 64),
            "one token": partial(_make, 1, 12, 64, first=77),
            "large positions": partial(_make, 5, 2, 64, first=131000),
            "head size 16": partial(_make, 9, 3, 16),
            "a quarter of each head": partial(_make, 7, 3, 80, rotated=20),
        },
        kept_float32=("cos", "sin"),
    ),
)
