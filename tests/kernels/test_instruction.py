"""Buffers, the buffers of instructions, and costs against numbers made by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import _native
from quire._native import KvFormat, RowType, WeightFormat, packed_bytes
from quire.kernels.activations import Activate
from quire.kernels.elementwise import Add
from quire.kernels.embedding import Embed
from quire.kernels.instruction import Buffer, Columns, Cost, Packing, StepShape
from quire.kernels.linear import Gemm
from quire.kernels.paged_attention import Attend, WriteKv
from quire.kernels.rms_norm import Norm
from quire.kernels.rope import Rotary

TILES = _native.has_tiles()


@pytest.mark.parametrize(
    ("width", "row_type", "row_bytes"),
    [
        (16, "f32", 64), (17, "f32", 128), (1, "f32", 64),
        # Odd rows of bf16 have a zero behind them.
        (32, "bf16", 64), (33, "bf16", 192 if TILES else 128), (31, "bf16", 64),
        # 48 bytes per 32 values. On AMX steps of many rows have bf16 in their place, an odd number of lines apart.
        (32, "q8", 64), (64, "q8", 192 if TILES else 128), (128, "q8", 320 if TILES else 192),
    ],
)  # fmt: skip
def test_rows_are_whole_cache_lines(width: int, row_type: str, row_bytes: int) -> None:
    assert Buffer(width, RowType[row_type]).row_bytes == row_bytes


a, b, c, d, e = (Buffer(8) for _ in range(5))
whole_a, whole_b = Columns(a, 0, 8), Columns(b, 0, 8)


@pytest.mark.parametrize(
    ("instruction", "buffers"),
    [
        (Rotary(None, a, b), [a, b]),
        (Norm(whole_a, b, None, None, 1e-5, False), [a, b]),
        (Add(whole_a, whole_b, c), [a, b, c]),
        (WriteKv(whole_a, whole_b, Columns(c, 6, 2), 1, None, None, 0.0, (d, e), 0, 1), [a, b, c, d, e]),
    ],
)
def test_instruction_names_the_buffers_it_reads_and_writes(instruction: Any, buffers: list[Buffer]) -> None:
    assert instruction.buffers == buffers


STEP = StepShape(((10, 1), (0, 5)), num_logit_rows=2, kv_format=KvFormat.bf16)
"""A decode at position 10 and a prompt of 5."""


def test_scores_and_positions_of_a_step_with_and_without_a_window() -> None:
    assert STEP.num_tokens == 6
    assert STEP.num_scores(0) == 11 + (1 + 2 + 3 + 4 + 5)
    assert STEP.num_positions(0) == 11 + 5
    assert STEP.num_scores(3) == 3 + (1 + 2 + 3 + 3 + 3)
    assert STEP.num_positions(3) == 3 + 5
    assert STEP.of_logit_rows().num_tokens == 2


@pytest.mark.parametrize("start", [0, 2, 3, 9])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_scores_of_a_chunk_are_those_of_its_tokens(start: int, window: int) -> None:
    for count in range(9):
        ends = range(start + 1, start + count + 1)
        assert StepShape(((start, count),)).num_scores(window) == sum(min(end, window or end) for end in ends)


WEIGHT = torch.empty(960, 576, device="meta")
Q4M = Packing.whole(960, WeightFormat.q4m)
Q4M_Q8 = Packing(((768, WeightFormat.q4m), (192, WeightFormat.q8)))
HIDDEN, QKV = Buffer(576), Buffer(960)
Q = Columns(QKV, 0, 576)
HEAD_BYTES = 2 * 3 * 64  # keys and values of 3 heads of 64


@pytest.mark.parametrize(
    ("instruction", "cost"),
    [
        (
            Gemm(WEIGHT, None, Q4M, Columns(HIDDEN, 0, 576), QKV),
            Cost(2 * 6 * 576 * 960, 60 * 18 * (256 + 64), 0, "int8"),
        ),
        (
            Gemm(WEIGHT, None, Q4M_Q8, Columns(HIDDEN, 0, 576), QKV),
            Cost(2 * 6 * 576 * 960, 48 * 18 * (256 + 64) + 12 * 18 * (512 + 32), 0, "int8"),
        ),
        (
            Gemm(WEIGHT, torch.empty(960), Packing.whole(960, WeightFormat.bf16), Columns(HIDDEN, 0, 576), QKV),
            Cost(2 * 6 * 576 * 960, 2 * 576 * 960 + 4 * 960, 0, "bf16"),
        ),
        (Embed(WEIGHT, Packing.whole(960, WeightFormat.f32), HIDDEN, 0, False), Cost(0, 6 * 4 * 576)),
        (
            Attend(Q, HIDDEN, 9, 0.125, 0, 0, 3, 0.0),
            Cost(4 * 576 * (11 + 15), 16 * HEAD_BYTES * 2, 0, "bf16"),
        ),
        (
            WriteKv(Q, Columns(QKV, 576, 192), Columns(QKV, 768, 192), 9, None, None, 0.0, None, 0, 3),
            Cost(0, 0, 6 * HEAD_BYTES * 2),
        ),
        (Norm(Columns(HIDDEN, 0, 576), HIDDEN, torch.empty(576), None, 1e-5, False), Cost(4 * 6 * 576, 4 * 576)),
    ],
)
def test_costs_are_those_made_by_hand(instruction: Any, cost: Cost) -> None:
    assert instruction.cost(STEP) == cost


@pytest.mark.parametrize(("tile_rows", "arithmetic"), [(6, "bf16"), (7, "int8"), (0, "int8")])
def test_products_in_tiles_count_as_bf16(tile_rows: int, arithmetic: str) -> None:
    gemm = Gemm(WEIGHT, None, Q4M, Columns(HIDDEN, 0, 576), QKV)
    assert gemm.cost(replace(STEP, tile_rows=tile_rows)).arithmetic == arithmetic


def test_int8_keys_and_values_have_a_scale_per_head() -> None:
    step = StepShape(((7, 1),), kv_format=KvFormat.i8)
    attend = Attend(Q, HIDDEN, 9, 0.125, 0, 0, 3, 0.0)
    assert attend.cost(step) == Cost(4 * 576 * 8, 8 * 2 * 3 * (64 + 4), 0, "int8")


def test_description_names_shapes_and_types() -> None:
    gemm = Gemm(WEIGHT, None, Q4M, Columns(Buffer(576, RowType.q8), 0, 576), QKV)
    assert gemm.describe(6) == "Gemm: x [6, 576] q8, out [6, 960] f32, weight [960, 576] q4m"
    stack = Gemm(WEIGHT, None, Q4M_Q8, Columns(Buffer(576, RowType.q8), 0, 576), QKV)
    assert stack.describe(6).endswith("weight [960, 576] q4m+q8")
    assert "out [6, 8] f32" in Activate(whole_a, b, None, False).describe(6)  # type: ignore[arg-type]
    assert packed_bytes(WeightFormat.q4m, 960, 576) == gemm.cost(STEP).bytes_read
