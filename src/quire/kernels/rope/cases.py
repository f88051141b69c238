"""Inputs for every version of the rotary embedding."""

import torch

from quire.kernels.case import Arguments, Case, Check, random
from quire.kernels.rope import KERNEL


def plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotate-half formula with the angles' cosine and sine rounded to x's dtype."""
    half = cos.shape[-1] // 2
    cosine, sine = cos[:, None].to(x.dtype), sin.abs()[:, None].to(x.dtype) * sin[:, None, half:].sign().repeat(1, 1, 2)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    return torch.cat((turned * cosine + rotated * sine.to(x.dtype), rest), -1)


def _make(
    num_tokens: int, heads: int, head_size: int, *, first: int = 0, strided: bool = False, rotated: int | None = None
) -> Arguments:
    size = head_size if rotated is None else rotated
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(first, first + num_tokens)[:, None] * frequencies
    x = random(num_tokens, heads + 3, head_size)[:, :heads] if strided else random(num_tokens, heads, head_size)
    return {
        "x": x,
        "cos": torch.cat((angles.cos(), angles.cos()), -1),
        "sin": torch.cat((-angles.sin(), angles.sin()), -1),
    }


CHECKS = (
    Check(
        KERNEL,
        (
            Case("empty", lambda: _make(0, 2, 64)),
            Case("one token", lambda: _make(1, 12, 64, first=77)),
            *(
                Case(f"head size {size}", lambda size=size: _make(9, 3, size))  # type: ignore[misc]
                for size in (16, 64, 80, 96, 128, 256)
            ),
            Case("a quarter of each head", lambda: _make(7, 3, 80, rotated=20)),
            Case("large positions", lambda: _make(5, 2, 64, first=131000)),
            Case("heads of a fused projection", lambda: _make(7, 12, 64, strided=True)),
        ),
        plain,
        kept_float32=("cos", "sin"),
    ),
)
