"""Products on tile registers: the kernels of AMX, here with its instructions emulated, on any processor with AVX-512.

int8 must give the bits of the other instruction sets. bf16 has an order of its own, whose oracle is in
test_gemm_float.py; what is tested here is every way to cut rows, inputs and outputs into tiles.
"""

import numpy as np
import pytest

from quire import _native
from tests.kernels.native.packed_weights import ISAS, each_isa, quantised, random_acts, random_weights
from tests.kernels.native.test_gemm_float import expected_on, product, random
from tests.kernels.native.test_gemm_quantised import multiply

AMX = [isa for isa in ISAS if isa.startswith("amx")]
pytestmark = pytest.mark.skipif(not AMX, reason="the kernels need AVX-512")
NUM_OUTPUTS = 273
"""Enough that one thread multiplies up to 64 rows at once; of fewer outputs, rows are cut smaller."""
ROWS = [1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 39, 40, 63, 64, 70]


@pytest.mark.parametrize("format_name", ["q4", "q4m", "q8"])
@pytest.mark.parametrize("num_inputs", [32, 64, 512, 544])
def test_int8_products_have_the_bits_of_the_other_instruction_sets(format_name: str, num_inputs: int) -> None:
    packed, acts = random_weights(format_name, NUM_OUTPUTS, num_inputs), random_acts(max(ROWS), num_inputs)
    reference = next(each_isa(lambda: multiply(packed, acts), ["avx512"])).view(np.uint32)
    for num_rows in ROWS:
        for threads in (1, 3):
            for found in each_isa(lambda: multiply(packed, acts[:num_rows], threads=threads), AMX):  # noqa: B023
                np.testing.assert_array_equal(found.view(np.uint32), reference[:num_rows], err_msg=f"{num_rows} rows")


@pytest.mark.parametrize("format_name", ["q4", "q4m", "q8"])
def test_the_largest_integers(format_name: str) -> None:
    values = np.where(np.arange(16 * 64).reshape(16, 64) % 3 == 0, -127.0, 127.0).astype(np.float32)
    packed, acts = random_weights(format_name, 32, 64), quantised(values)
    reference, *others = each_isa(lambda: multiply(packed, acts), ["scalar", *AMX])
    for found in others:
        np.testing.assert_array_equal(found.view(np.uint32), reference.view(np.uint32))


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
