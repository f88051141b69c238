"""Rows of packed tables. That packing keeps values is test_packing's; here: which row goes where."""

import numpy as np
import pytest

from quire import _native
from quire.weights.weight_tensor import decode
from tests.kernels.native.packed_weights import (
    FLOATS_STORED,
    FORMATS,
    STORED,
    Packed,
    each_isa,
    embedded,
    empty_rows,
    finite_rows,
    rows_of,
    run,
    whole_blocks,
)

STORED_AS = STORED | FLOATS_STORED


def table(format_name: str, num_rows: int, width: int) -> tuple[Packed, np.ndarray]:
    raw = finite_rows(STORED_AS[format_name], num_rows, width)
    packed = Packed(format_name, num_rows, width).add_rows(STORED_AS[format_name], raw)
    if format_name == "nvfp4":
        return packed, np.concatenate([table_row(format_name, raw[row : row + 1], width) for row in range(num_rows)])
    return packed, decode(raw, STORED_AS[format_name])


def table_row(format_name: str, raw: np.ndarray, width: int) -> np.ndarray:
    """Return what a table of this row alone holds."""
    return Packed(format_name, 1, width).add_rows(STORED_AS[format_name], raw).decoded()


@pytest.mark.parametrize("format_name", list(FORMATS))
def test_rows_of_any_ids_on_every_instruction_set(format_name: str) -> None:
    packed, values = table(format_name, 50, whole_blocks(format_name, 96))
    ids = np.array([49, 0, 17, 17, 31, 32, 16, 48])
    for found in each_isa(lambda: embedded(packed, ids)):
        assert np.array_equal(found, values[ids])


@pytest.mark.parametrize("format_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("width", [1, 15, 33, 50])
def test_floats_of_any_width(format_name: str, width: int) -> None:
    packed, values = table(format_name, 20, width)
    ids = np.arange(19, -1, -1)
    out = empty_rows("f32", 20, width)
    plan = _native.Plan(1, 20, 1)
    plan.embed(packed.weight, rows_of(out))
    run(plan, ids)
    assert np.array_equal(out[:, :width], values[ids])
    assert np.isnan(out[:, width:]).all()


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_share_the_tokens(threads: int) -> None:
    packed, values = table("q8", 40, 64)
    ids = np.random.default_rng(0).integers(0, 40, 33)
    assert np.array_equal(embedded(packed, ids, threads), values[ids])


@pytest.mark.parametrize("width", [32, 50])
def test_positions_with_an_offset_are_added(width: int) -> None:
    words, word_values = table("f32", 20, width)
    places, place_values = table("f16", 40, width)
    out = np.zeros((6, width), dtype=np.float32)
    plan = _native.Plan(1, 6, 1)
    plan.embed(words.weight, rows_of(out))
    plan.embed(places.weight, rows_of(out), offset=2, of_positions=True, add=True)
    ids = np.array([3, 3, 19, 0, 7, 1])
    run(plan, ids, start=9)
    assert np.array_equal(out, word_values[ids] + place_values[11:17])


def test_step_without_tokens_writes_nothing() -> None:
    packed, _ = table("q4", 16, 32)
    out = empty_rows("f32", 2, 29)
    plan = _native.Plan(2, 2, 1)
    plan.embed(packed.weight, rows_of(out))
    run(plan, np.zeros(0))
    assert np.isnan(out).all()
