"""Products of int8 rows with 4- and 8-bit weights: GB/s and GMAC/s for each number of rows, and their shares of what
this machine can do, measured in the same run.

    python -m benchmarks.kernels.gemm_quantised [--rows 1,8,64,512] [--threads 2] [--isa avx2] [--json]

The shapes are SmolLM2's. With few rows a pass goes over copies of the weights that no cache holds, as a model's layers
do. "of read" is the share of one thread's reading speed times the number of threads, "of VNNI" that of VPDPBUSD.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

from quire import _native
from quire.runtime.machine_limits import MachineLimits, measure_limits

SECONDS = 0.25
"""Spent on each figure; the shortest run counts."""
COLD_BYTES = 100e6
MAX_COLD_ROWS = 64
ACT_BLOCK_BYTES = 48


@dataclass(frozen=True)
class Product:
    name: str
    weight_format: str
    num_outputs: int
    num_inputs: int
    gated: bool = False
    add: bool = False


PRODUCTS = (
    Product("qkv", "q4m", 960, 576),
    Product("o", "q4m", 576, 576, add=True),
    Product("gate_up", "q4m", 3072, 576, gated=True),
    Product("down", "q4m", 576, 1536, add=True),
    Product("down q4", "q4", 576, 1536, add=True),
    Product("head", "q8", 49152, 576),
)


@dataclass(frozen=True)
class Figure:
    product: str
    rows: int
    microseconds: float
    gbs: float
    gmacs: float
    of_read: float
    of_vnni: float


def aligned(num_bytes: int, value: int) -> np.ndarray:
    memory = np.full(num_bytes + 64, value, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


def packed(product: Product) -> np.ndarray:
    """Random weights. Halves of 0x2c03 are about 0.063."""
    kind = getattr(_native.WeightFormat, product.weight_format)
    data = aligned(_native.packed_bytes(kind, product.num_outputs, product.num_inputs), 0)
    data[:] = np.random.default_rng(0).integers(0, 256, data.size, dtype=np.uint8)
    tiles = data.reshape(-1, _native.tile_bytes(kind, product.num_inputs))
    unpacked = product.num_inputs * (16 if product.weight_format == "q8" else 8)
    tiles[:, unpacked::2], tiles[:, unpacked + 1 :: 2] = 0x03, 0x2C
    return data


def seconds_of(plan: _native.Plan, num_rows: int, num_threads: int, *, head: bool) -> float:
    """The shortest run. One thread's is CPU time: other processes then count less."""
    zeros, counts = np.zeros(num_rows, dtype=np.int32), np.full(1, num_rows, dtype=np.int32)
    zero, count, logit_rows = zeros.ctypes.data, counts.ctypes.data, num_rows if head else 0
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    best, end = np.inf, time.perf_counter() + SECONDS
    while time.perf_counter() < end or best == np.inf:
        start = clock()
        plan.run(1, 1, logit_rows, zero, zero, count, zero, zero, num_rows, 0, 0, 0)
        best = min(best, clock() - start)
    return float(best)


def figure(product: Product, weights: np.ndarray, num_rows: int, num_threads: int, limits: MachineLimits) -> Figure:
    kind = getattr(_native.WeightFormat, product.weight_format)
    row_bytes = product.num_inputs // 32 * ACT_BLOCK_BYTES
    acts = np.ones(num_rows * row_bytes, dtype=np.uint8)
    head = product.name == "head"
    out = np.zeros((num_rows, product.num_outputs if not head else num_threads * 2), dtype=np.float32)
    out_type = _native.RowType.q8 if product.gated else _native.RowType.f32
    x = _native.Rows(acts.ctypes.data, row_bytes, _native.RowType.q8)
    copies = 1 if num_rows > MAX_COLD_ROWS else max(1, round(COLD_BYTES / weights.size))
    plan = _native.Plan(num_threads, num_rows, num_rows)
    memory = aligned(copies * weights.size, 0)
    for index in range(copies):
        memory[index * weights.size : (index + 1) * weights.size] = weights
        address = memory.ctypes.data + index * weights.size
        weight = _native.Weight(address, product.num_outputs, product.num_inputs, kind)
        if head:
            plan.head(weight, 0, x, out.ctypes.data, out.ctypes.data + out.nbytes // 2, num_rows)
        else:
            activation = _native.Activation.silu if product.gated else _native.Activation.none
            rows = _native.Rows(out.ctypes.data, out.strides[0], out_type)
            plan.gemm(weight, 0, x, rows, activation, product.gated, product.add)
    seconds = seconds_of(plan, num_rows, num_threads, head=head) / copies
    gbs = weights.size / seconds / 1e9
    gmacs = num_rows * product.num_outputs * product.num_inputs / seconds / 1e9
    return Figure(
        product.name, num_rows, round(seconds * 1e6, 1), round(gbs, 1), round(gmacs, 1),
        round(gbs * 1e9 / limits.read_bytes_per_s, 3),
        round(2e9 * gmacs / limits.flops_per_s["int8"], 3),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default=_native.isa())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _native.set_isa(arguments.isa)
    torch.set_num_threads(arguments.threads)
    limits = measure_limits("cpu", ["int8"])
    if not arguments.json:
        print(f"{arguments.threads} threads, {_native.isa()}; {limits}")
        print("product      N x I      rows        µs    GB/s  of read  GMAC/s  of int8")
    figures = []
    for product in PRODUCTS:
        weights = packed(product)
        for num_rows in map(int, arguments.rows.split(",")):
            found = figure(product, weights, num_rows, arguments.threads, limits)
            figures.append(found)
            if not arguments.json:
                print(
                    f"{product.name:8} {product.num_outputs:6}x{product.num_inputs:<5} {num_rows:5} "
                    f"{found.microseconds:10.1f} {found.gbs:7.1f} {found.of_read:7.0%} {found.gmacs:8.1f} "
                    f"{found.of_vnni:7.0%}"
                )
    if arguments.json:
        print(
            json.dumps({"isa": _native.isa(), "limits": asdict(limits), "figures": [asdict(item) for item in figures]})
        )


if __name__ == "__main__":
    main()
