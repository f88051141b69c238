"""Nothing is touched past weights, rows, logits, tables and KV pool: they end where no page may be touched."""

import ctypes
import itertools
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quire import _native
from tests.kernels.native.kv_steps import FORMATS as KV_FORMATS
from tests.kernels.native.kv_steps import Extras, Pool, Runner, Shape
from tests.kernels.native.packed_weights import (
    ACT_BLOCK,
    FORMATS,
    ISAS,
    random_acts,
    random_weights,
    rows_of,
    run,
    whole_blocks,
)
from tests.kernels.native.test_experts import Experts, random_step

NUM_OUTPUTS = (257, 273)
"""Enough for 64 rows at once; an odd number of tiles and an even one."""
NUM_INPUTS = {_native.RowType.f32: 90, _native.RowType.bf16: 90, _native.RowType.q8: 96}
SIZES = {_native.RowType.f32: 4 * 90, _native.RowType.bf16: 2 * 90, _native.RowType.q8: 96 // 32 * ACT_BLOCK.itemsize}
"""Of a row in bytes."""
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
    for weight_format, num_outputs in itertools.product(FORMATS.values(), NUM_OUTPUTS):
        kind = _native.wanted_rows(weight_format)
        num_inputs = whole_blocks(weight_format.name, NUM_INPUTS[kind])
        size = SIZES[kind] * num_inputs // NUM_INPUTS[kind]
        num_bytes = -(-num_outputs // 16) * _native.tile_bytes(weight_format, num_inputs)
        weight = _native.Weight(before_a_wall(num_bytes), num_outputs, num_inputs, weight_format)
        for num_rows in (1, 3, 7, 8, 9, 15, 16, 17, 33, 70):
            x = _native.Rows(before_a_wall(num_rows * size), size, kind)
            out = _native.Rows(before_a_wall(num_rows * num_outputs * 4), num_outputs * 4, _native.RowType.f32)
            plan = _native.Plan(1, num_rows, 1)
            plan.gemm(weight, 0, x, out)
            run(plan, np.zeros(num_rows))


def array_before_a_wall(values: list[int]) -> int:
    address = before_a_wall(4 * len(values))
    ctypes.memmove(address, np.array(values, np.int32).ctypes.data, 4 * len(values))
    return address


def fetch_at_the_wall(isa: str) -> None:
    """Requests of unequal length; keys and values are at an address that may not be read."""
    _native.set_isa(isa)
    tables = array_before_a_wall(list(range(3 * 40)))
    tokens = np.zeros((3, 640), np.int32)
    packed, acts = random_weights("q4", 96, 96), random_acts(64, 96)
    for rows, counts in itertools.product(([0, 1, 2], [2, 1, 0]), ([1, 5, 2], [3, 20, 21], [20, 24, 20], [1, 1, 1])):
        starts = [0, 100, 640 - counts[2]]
        step = [array_before_a_wall(values) for values in (rows, starts, counts)]
        results = []
        for threads, window, begin, end in [
            (1, 0, 0, 0), (1, 0, 0, 1), (1, 0, 0.8, 1), (1, 30, 0.1, 1), (2, 0, 0.5, 1), (3, 1, 0.3, 0.7), (7, 0, 0, 1),
        ]:  # fmt: skip
            kv = _native.KvLayer(4096, 1 << 40, 16, 1, 2, _native.KvFormat.bf16, 0)
            out = np.zeros((sum(counts), 96), np.float32)
            plan = _native.Plan(threads, 64, 3)
            ahead = _native.KvAhead(kv, window, begin, end)
            plan.gemm(packed.weight, 0, rows_of(acts), rows_of(out), ahead=ahead)
            plan.run(1, 3, 0, *step, 0, tokens.ctypes.data, 640, tables, 40, 0)
            results.append(out)
        assert all(np.array_equal(results[0], result) for result in results[1:])
        assert results[0].any()


def sample_at_the_wall(isa: str) -> None:
    """Also lists that name the id after the vocabulary's last."""
    _native.set_isa(isa)
    for size in (1, 16, 257, 512):
        logits, token_ids = before_a_wall(4 * size), np.zeros(1, np.int32)
        for temperature, top_k, top_p in ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.9)):
            ids, values = np.array([size, size + 1]), np.ones(2, np.float32)
            options = _native.RowOptions()
            options.temperature, options.top_k, options.top_p = temperature, top_k, top_p
            options.ban(ids.ctypes.data, 2)
            options.bias(ids.ctypes.data, values.ctypes.data, 2)
            options.penalise(ids.ctypes.data, values.ctypes.data, 2)
            _native.Sampler(size, None).sample(logits, size, [options], token_ids.ctypes.data)


def attend_at_the_wall(isa: str) -> None:
    _native.set_isa(isa)

    def allocate(count: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * count).from_address(before_a_wall(count))
        return torch.frombuffer(memory, dtype=torch.uint8)

    for kv_format, head_size in itertools.product(KV_FORMATS, (6, 16, 24, 64)):
        shape = Shape(3, 1, head_size, 16, kv_format)
        pool = Pool(shape, [16 * 9])
        pool.stride_bytes = shape.block_bytes
        pool.memory, pool.first_byte = allocate(pool.num_blocks * shape.block_bytes), 0
        pool.tables[0, :9] = pool.num_blocks - 1 - torch.arange(9)
        for start, count in ((0, 16), (16, 112), (128, 15), (143, 1)):
            Runner(pool, Extras(), max_tokens=count, allocate=allocate).run([(0, start, count)])


class ExpertsAtTheWall(Experts):
    """Experts whose rows end where no page may be touched, without a column beside."""

    def rows(self, values: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(super().rows(values))
        address = before_a_wall(rows.nbytes)
        ctypes.memmove(address, rows.ctypes.data, rows.nbytes)
        memory = (ctypes.c_uint8 * rows.nbytes).from_address(address)
        return np.frombuffer(memory, rows.dtype).reshape(rows.shape)


def route_at_the_wall(isa: str) -> None:
    """Rows of odd width too, which bf16 weights multiply in pairs; what is behind a row changes nothing."""
    _native.set_isa(isa)
    kinds = (("f32", 35), ("bf16", 35), ("bf16", 96), ("q4", 96))
    for (format_name, width), num_tokens in itertools.product(kinds, (1, 2, 70)):
        experts = [kind(format_name, width=width) for kind in (Experts, ExpertsAtTheWall)]
        values, logits = random_step(num_tokens, experts[0])
        values[1::2] = np.nan
        logits[1::2, :3], logits[::2, 3:] = -100, -100  # no expert has rows with NaN and without
        with np.errstate(invalid="ignore"):
            usual, at_the_wall = (item.run(values, logits) for item in experts)
        assert np.array_equal(usual[::2].view(np.uint32), at_the_wall[::2].view(np.uint32))
        assert np.isfinite(usual[::2]).all()


def run_all() -> None:
    torch.set_num_threads(1)
    for isa, action in itertools.product(
        ISAS, (multiply_at_the_wall, fetch_at_the_wall, sample_at_the_wall, attend_at_the_wall, route_at_the_wall)
    ):
        print(action.__name__, isa, flush=True)
        action(isa)


def test_nothing_is_touched_past_weights_rows_results_tables_and_pool() -> None:
    code = "from tests.kernels.native.test_bounds import run_all; run_all()"
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout.splitlines()[-1:]} {result.stderr} code {result.returncode}"


def test_part_that_ends_before_it_begins_is_refused() -> None:
    kv = _native.KvLayer(4096, 4096, 16, 1, 64, _native.KvFormat.bf16, 0)
    with pytest.raises(ValueError, match="ascending"):
        _native.KvAhead(kv, 0, 0.5, 0.4)
