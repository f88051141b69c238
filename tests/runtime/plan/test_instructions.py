"""Buffers and what instructions touch."""

from typing import Any

import pytest

from quire._native import RowType
from quire.runtime.plan.instructions import (
    Activate,
    Add,
    Attend,
    Buffer,
    Columns,
    Embed,
    Gemm,
    Norm,
    Rotary,
    WriteKv,
    touched,
)


@pytest.mark.parametrize(
    ("width", "row_type", "row_bytes"),
    [
        (16, "f32", 64), (17, "f32", 128), (1, "f32", 64),
        # Odd rows of bf16 have a zero behind them.
        (32, "bf16", 64), (33, "bf16", 128), (31, "bf16", 64),
        # 48 bytes per 32 values.
        (32, "q8", 64), (64, "q8", 128), (128, "q8", 192),
    ],
)  # fmt: skip
def test_rows_are_whole_cache_lines(width: int, row_type: str, row_bytes: int) -> None:
    assert Buffer(width, RowType[row_type]).row_bytes == row_bytes


def test_buffers_of_one_shape_are_different() -> None:
    assert len({Buffer(8), Buffer(8)}) == 2


a, b, c, d, e = (Buffer(8) for _ in range(5))


@pytest.mark.parametrize(
    ("instruction", "buffers"),
    [
        (Embed(None, a, 0, False), [a]),
        (Rotary(None, a, b), [a, b]),
        (Norm(a, b, None, None, 1e-5, False), [a, b]),
        (Gemm(None, None, a, b), [a, b]),
        (Activate(a, b), [a, b]),
        (Add(a, b, c), [a, b, c]),
        (WriteKv(Columns(a, 0), Columns(b, 4), Columns(c, 6), 1, None, None, 0.0, (d, e), 0), [a, b, c, d, e]),
        (WriteKv(Columns(a, 0), Columns(a, 4), Columns(a, 6), 1, None, None, 0.0, None, 0), [a, a, a]),
        (Attend(Columns(a, 0), b, 1, 0.5, 0, 0), [a, b]),
    ],
)
def test_what_instructions_touch(instruction: Any, buffers: list[Buffer]) -> None:
    assert touched(instruction) == buffers
