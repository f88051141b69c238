"""Products on tile registers: the kernels of AMX, here with its instructions emulated, on any processor with AVX-512.

bf16 has an order of its own, whose oracle is in test_gemm_float.py; what is tested here is every way to cut rows,
inputs and outputs into tiles, and 4- and 8-bit weights dequantised to bf16.
"""

import numpy as np
import pytest
import torch

from quire import _native
from tests.kernels.native.packed_weights import (
    ISAS,
    STORED,
    Packed,
    each_isa,
    quantised,
    random_stack,
    random_weights,
    rows_of,
    run,
    whole_blocks,
)
from tests.kernels.native.test_gemm_float import expected_on, product, random
from tests.kernels.native.test_gemm_quantised import CODEBOOKS, HAVE_MINIMA, factors, multiply

AMX = [isa for isa in ISAS if isa.startswith("amx")]
pytestmark = pytest.mark.skipif(not AMX, reason="the kernels need AVX-512")
NUM_OUTPUTS = 273
"""Enough that one thread multiplies up to 64 rows at once; of fewer outputs, rows are cut smaller."""


def dequantised(format_name: str, num_outputs: int, num_inputs: int) -> np.ndarray:
    """Return the bf16 weights that native/ops/gemm_amx.h makes of `random_weights`, as fp32."""
    d, m, integers = factors(format_name, (num_outputs, num_inputs))
    if format_name in CODEBOOKS:
        exact = integers.astype(np.float32) * (d * np.float32(1.0028))[..., None]
        return (exact.view(np.uint32) & 0xFFFF0000).view(np.float32).reshape(num_outputs, num_inputs)
    levels = {"q5": 32, "q5m": 32, "q5k": 32, "q6k": 64, "q8": 256}.get(format_name, 16)
    has_minima = format_name in HAVE_MINIMA
    u = integers + (0 if has_minima else levels // 2)
    d, m = d[..., None], (m if has_minima else -(levels // 2) * d)[..., None]
    factor = np.float32(1.0028)
    least = m - np.longdouble(levels) * d
    scale, base = levels * d * factor, least.astype(np.float32) * factor
    values = ((1 + u / np.longdouble(levels)) * scale + base).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32).reshape(num_outputs, num_inputs)


@pytest.mark.parametrize("format_name", STORED)
@pytest.mark.parametrize("num_inputs", [32, 96, 576, 608, 1216])
def test_quantised_weights_are_multiplied_as_bf16(format_name: str, num_inputs: int) -> None:
    num_inputs = whole_blocks(format_name, num_inputs)
    packed, weight = random_weights(format_name, 49, num_inputs), dequantised(format_name, 49, num_inputs)
    assert np.abs(weight - packed.decoded()).max() <= 2**-7.6 * np.abs(packed.decoded()).max()
    x = random((300, num_inputs), "bf16", 1)
    wanted = expected_on("amx", x, torch.from_numpy(weight).bfloat16(), "bf16")
    rows = x.view(torch.uint16).numpy()
    for first, count in (
        (0, 1),
        (1, 7),
        (2, 15),
        (3, 16),
        (4, 17),
        (0, 33),
        (5, 48),
        (6, 64),
        (0, 65),
        (1, 90),
        (0, 300),
    ):
        for threads in (1, 3):
            for found in each_isa(lambda: multiply(packed, rows[first : first + count], threads=threads), AMX):  # noqa: B023
                np.testing.assert_array_equal(
                    found.view(np.uint32), wanted[first : first + count], err_msg=f"{count} rows"
                )


@pytest.mark.parametrize("num_rows", [5, 40, 150])
def test_parts_of_a_stack_are_multiplied_as_each_alone(num_rows: int) -> None:
    packed, x = random_stack(("q4k", 96), ("mxfp4", 32), ("iq4xs", 41)), random((num_rows, 256), "bf16", 1)
    rows = x.view(torch.uint16).numpy()
    for isa in AMX:
        wanted = next(each_isa(lambda: np.concatenate([multiply(part, rows) for part in packed.parts], 1), [isa]))
        for threads in (1, 2):
            found = next(each_isa(lambda: multiply(packed, rows, threads=threads), [isa]))  # noqa: B023
            np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def converted_and_multiplied(packed: Packed, values: np.ndarray, tile_rows: int) -> np.ndarray:
    """fp32 rows to rows that may be int8, and their product, in one step."""
    between = np.zeros((len(values), 2 * values.shape[1]), np.uint8)
    out = np.zeros((len(values), packed.num_outputs), np.float32)
    rows = _native.Rows(between.ctypes.data, between.shape[1], _native.RowType.q8)
    plan = _native.Plan(2, len(values), 1)
    plan.set_tile_rows(tile_rows)
    plan.activate(x=rows_of(values), out=rows, width=values.shape[1])
    plan.gemm(packed.weight, 0, rows, rows_of(out))
    run(plan, np.zeros(len(values)))
    return out


@pytest.mark.parametrize(("num_rows", "tile_rows"), [(11, 12), (12, 12), (20, 12), (20, 0)])
def test_steps_of_enough_rows_have_bf16_in_place_of_int8_rows(num_rows: int, tile_rows: int) -> None:
    packed, values = random_weights("q4m", 64, 96), random((num_rows, 96), "f32", 3)
    as_bf16 = values.bfloat16().view(torch.uint16).numpy()
    rows = as_bf16 if 0 < tile_rows <= num_rows else quantised(values.numpy())
    for isa in AMX:
        wanted = next(each_isa(lambda: multiply(packed, rows), [isa]))
        found = next(each_isa(lambda: converted_and_multiplied(packed, values.numpy(), tile_rows), [isa]))
        np.testing.assert_array_equal(found, wanted)


def test_other_instruction_sets_have_no_tiles() -> None:
    for has_tiles in each_isa(lambda: np.array(_native.has_tiles()), ["scalar"]):
        assert not has_tiles
        with pytest.raises(ValueError, match="no tiles"):
            _native.Plan(1, 1, 1).set_tile_rows(12)


@pytest.mark.parametrize("num_inputs", [1, 2, 31, 32, 33, 64, 95, 530])
def test_bf16_sums_are_in_the_order_of_the_tile_instruction(num_inputs: int) -> None:
    x, weight = random((40, num_inputs), "bf16", 1), random((NUM_OUTPUTS, num_inputs), "bf16", 2)
    wanted = expected_on("amx", x, weight, "bf16")
    for isa in AMX:
        before = _native.isa()
        _native.set_isa(isa)
        try:
            for first, count in ((0, 40), (0, 1), (39, 1), (3, 15), (4, 16), (5, 17), (6, 31), (7, 32), (7, 33)):
                found = product(x[first : first + count], weight, "bf16", 2)
                np.testing.assert_array_equal(found, wanted[first : first + count], err_msg=f"{count} rows")
        finally:
            _native.set_isa(before)
