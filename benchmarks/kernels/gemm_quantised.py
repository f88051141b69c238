"""Products of int8 rows with 4- and 8-bit weights: GB/s and GMAC/s for each number of rows, and their shares of what
this machine can do, measured in the same run.

    python -m benchmarks.kernels.gemm_quantised [--shapes qwen3-1.7b] [--rows 1,8] [--threads 2] [--isa avx2] [--json]

With few rows a pass goes over copies of the weights that no cache holds, as a model's layers do. "of read" is the share
of the speed at which these threads read the same memory and do nothing else, by turns with the product, since other
guests of a machine change it; "of int8" is the share of the arithmetic.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

from quire import _native
from quire.runtime.huge_pages import allocate
from quire.runtime.machine_limits import NATIVE_KINDS, MachineLimits, measure_limits
from quire.weights.weight_tensor import BLOCK_FORMATS, BlockFormat

SECONDS = 0.6
"""Spent on each figure; the shortest run counts."""
COLD_BYTES = 400e6
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


PRODUCTS = {
    "smollm2": (
        Product("qkv", "q4m", 960, 576),
        Product("o", "q4m", 576, 576, add=True),
        Product("gate_up", "q4m", 3072, 576, gated=True),
        Product("down", "q4m", 576, 1536, add=True),
        Product("down", "q4", 576, 1536, add=True),
        Product("head", "q8", 49152, 576),
    ),
    "qwen3-1.7b": (
        Product("qkv", "q4k", 4096, 2048),
        Product("o", "q4k", 2048, 2048, add=True),
        Product("gate_up", "q4k", 12288, 2048, gated=True),
        Product("gate_up", "q4m", 12288, 2048, gated=True),
        Product("gate_up", "q5", 12288, 2048, gated=True),
        Product("gate_up", "q5m", 12288, 2048, gated=True),
        Product("gate_up", "q5k", 12288, 2048, gated=True),
        Product("gate_up", "q8", 12288, 2048, gated=True),
        Product("gate_up", "iq4nl", 12288, 2048, gated=True),
        Product("gate_up", "iq4xs", 12288, 2048, gated=True),
        Product("gate_up", "mxfp4", 12288, 2048, gated=True),
        Product("gate_up", "nvfp4", 12288, 2048, gated=True),
        Product("down", "q4k", 2048, 6144, add=True),
        Product("down", "q6k", 2048, 6144, add=True),
        Product("head", "q6k", 151936, 2048),
    ),
}


@dataclass(frozen=True)
class Figure:
    product: str
    rows: int
    microseconds: float
    gbs: float
    gmacs: float
    of_read: float
    of_vnni: float


STORED = {"q4": "Q4_0", "q4m": "Q4_1", "q5": "Q5_0", "q5m": "Q5_1", "q8": "Q8_0", "q4k": "Q4_K", "q5k": "Q5_K",
          "q6k": "Q6_K", "iq4nl": "IQ4_NL", "iq4xs": "IQ4_XS", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}  # fmt: skip
BLOCKS = {**BLOCK_FORMATS, "NVFP4": BlockFormat("NVFP4", 40, 32, 22)}
"""NVFP4: as native/weights/pack.h has it."""


def packed(product: Product) -> np.ndarray:
    """Random blocks with ordinary scales."""
    stored = BLOCKS[STORED[product.weight_format]]
    kind = _native.WeightFormat[product.weight_format]
    raw = np.random.default_rng(0).integers(
        0, 256, (16, product.num_inputs // stored.block_len, stored.block_bytes), np.uint8
    )
    for column in (208,) if stored.name == "Q6_K" else (0, 2):
        raw[..., column : column + 2] = 0x03, 0x1C  # about 0.004
    if stored.name == "NVFP4":
        raw[..., 4:6] &= 0x77
    if stored.name == "MXFP4":
        raw[..., 0] = 120
    data = allocate(_native.packed_bytes(kind, product.num_outputs, product.num_inputs))
    tile = data[: _native.packed_bytes(kind, 16, product.num_inputs)]
    job = _native.PackedRows(
        stored.name, raw.ctypes.data, 16, product.num_inputs, raw.strides[0], data.ctypes.data, 0, kind
    )
    _native.pack_rows([job])
    data.reshape(-1, len(tile))[1:] = tile
    return data


def seconds_of(plan: _native.Plan, reading: _native.Plan, num_rows: int, *, head: bool) -> tuple[float, float]:
    """The shortest run of each of two plans, by turns."""
    zeros, counts = np.zeros(num_rows, dtype=np.int32), np.full(1, num_rows, dtype=np.int32)
    zero, count, logit_rows = zeros.ctypes.data, counts.ctypes.data, num_rows if head else 0
    best, end = [np.inf, np.inf], time.perf_counter() + SECONDS
    while time.perf_counter() < end or best[1] == np.inf:
        for index, one in enumerate((plan, reading)):
            start = time.perf_counter()
            one.run(1, 1, logit_rows, zero, zero, count, zero, zero, num_rows, 0, 0, 0)
            best[index] = min(best[index], time.perf_counter() - start)
    return best[0], best[1]


def figure(product: Product, weights: np.ndarray, num_rows: int, num_threads: int, limits: MachineLimits) -> Figure:
    kind = _native.WeightFormat[product.weight_format]
    row_bytes = product.num_inputs // 32 * ACT_BLOCK_BYTES
    acts = np.ones(num_rows * row_bytes, dtype=np.uint8)
    head = product.name == "head"
    out = np.zeros((num_rows, product.num_outputs if not head else num_threads * 2), dtype=np.float32)
    out_type = _native.RowType.q8 if product.gated else _native.RowType.f32
    x = _native.Rows(acts.ctypes.data, row_bytes, _native.RowType.q8)
    copies = 1 if num_rows > MAX_COLD_ROWS else max(1, round(COLD_BYTES / weights.size))
    plan = _native.Plan(num_threads, num_rows, num_rows)
    memory = allocate(copies * weights.size)
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
    reading, operations = _native.Plan(num_threads, num_rows, num_rows), np.zeros(num_threads, np.int64)
    reading.peak(NATIVE_KINDS.index("read"), 1, memory.ctypes.data, memory.nbytes, operations.ctypes.data)
    seconds, read_seconds = (total / copies for total in seconds_of(plan, reading, num_rows, head=head))
    gbs = weights.size / seconds / 1e9
    gmacs = num_rows * product.num_outputs * product.num_inputs / seconds / 1e9
    return Figure(
        f"{product.name} {product.weight_format}", num_rows, round(seconds * 1e6, 1), round(gbs, 1), round(gmacs, 1),
        round(read_seconds / seconds, 3),
        round(2e9 * gmacs / limits.flops_per_s["int8"], 3),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="smollm2", choices=PRODUCTS)
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
        print("product         N x I      rows        µs    GB/s  of read  GMAC/s  of int8")
    figures = []
    for product in PRODUCTS[arguments.shapes]:
        weights = packed(product)
        for num_rows in map(int, arguments.rows.split(",")):
            found = figure(product, weights, num_rows, arguments.threads, limits)
            figures.append(found)
            if not arguments.json:
                print(
                    f"{found.product:11} {product.num_outputs:6}x{product.num_inputs:<5} {num_rows:5} "
                    f"{found.microseconds:10.1f} {found.gbs:7.1f} {found.of_read:7.0%} {found.gmacs:8.1f} "
                    f"{found.of_vnni:7.0%}"
                )
    if arguments.json:
        print(
            json.dumps({"isa": _native.isa(), "limits": asdict(limits), "figures": [asdict(item) for item in figures]})
        )


if __name__ == "__main__":
    main()
