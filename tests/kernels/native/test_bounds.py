"""Products read their weights and rows, and nothing after them: both end where the next page may not be touched."""

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quire import _native
from tests.kernels.native.packed_weights import ACT_BLOCK, FORMATS, ISAS, run

NUM_OUTPUTS, NUM_INPUTS = 273, 96  # enough outputs for 64 rows at once
SIZES = {_native.RowType.f32: 4 * NUM_INPUTS, _native.RowType.bf16: 2 * NUM_INPUTS}
SIZES[_native.RowType.q8] = NUM_INPUTS // 32 * ACT_BLOCK.itemsize
MEMORY: list[mmap.mmap] = []


def before_a_wall(num_bytes: int) -> int:
    """Address of zeroed memory whose end is the start of a page without access; never freed."""
    page = mmap.PAGESIZE
    num_pages = -(-num_bytes // page)
    memory = mmap.mmap(-1, (num_pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    c_library = ctypes.CDLL(None, use_errno=True)
    assert c_library.mprotect(ctypes.c_void_p(start + num_pages * page), page, 0) == 0
    MEMORY.append(memory)
    return start + num_pages * page - num_bytes


def multiply_at_the_wall(isa: str) -> None:
    _native.set_isa(isa)
    for weight_format in FORMATS.values():
        kind = _native.wanted_rows(weight_format)
        tile_bytes = _native.tile_bytes(weight_format, NUM_INPUTS)
        weight = _native.Weight(
            before_a_wall(-(-NUM_OUTPUTS // 16) * tile_bytes), NUM_OUTPUTS, NUM_INPUTS, weight_format
        )
        for num_rows in (1, 3, 7, 8, 9, 15, 16, 17, 33, 70):
            x = _native.Rows(before_a_wall(num_rows * SIZES[kind]), SIZES[kind], kind)
            out = _native.Rows(before_a_wall(num_rows * NUM_OUTPUTS * 4), NUM_OUTPUTS * 4, _native.RowType.f32)
            plan = _native.Plan(1, num_rows, 1)
            plan.gemm(weight, 0, x, out)
            run(plan, np.zeros(num_rows))


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_touched_past_weights_rows_and_results(isa: str) -> None:
    code = f"from tests.kernels.native.test_bounds import multiply_at_the_wall; multiply_at_the_wall({isa!r})"
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr or f"ended by signal {-result.returncode}"
