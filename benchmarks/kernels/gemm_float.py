"""Products with fp32, fp16 and bf16 weights on one thread: GB/s and GMAC/s for each number of rows, and their shares
of what this machine can do, measured in the same run.

    python -m benchmarks.kernels.gemm_float [--rows 1,8,64,512] [--shape 1536x576] [--isa avx2] [--json]
"""

import argparse
import json
import time
from typing import Any

import numpy as np

from benchmarks.kernels.peaks import Peaks, measure
from quire import _native

FORMATS = ("f32", "f16", "bf16")
SECONDS = 0.3
"""Spent on each figure; the shortest run counts."""


def seconds_of(weight_format: str, num_outputs: int, num_inputs: int, num_rows: int) -> tuple[float, int]:
    """CPU seconds of one product, and the bytes of its weights."""
    kind = getattr(_native.WeightFormat, weight_format)
    num_bytes = -(-num_outputs // 16) * _native.tile_bytes(kind, num_inputs)
    weights = np.ones(num_bytes + 64, dtype=np.uint8)
    width = num_inputs + num_inputs % 2
    item_bytes = 2 if weight_format == "bf16" else 4
    x = np.ones(num_rows * width * item_bytes, dtype=np.uint8)
    out = np.empty((num_rows, num_outputs), dtype=np.float32)
    plan = _native.Plan(1, num_rows, 1)
    plan.gemm(
        _native.Weight(weights.ctypes.data + -weights.ctypes.data % 64, num_outputs, num_inputs, kind),
        0,
        _native.Rows(x.ctypes.data, width * item_bytes, _native.wanted_rows(kind)),
        _native.Rows(out.ctypes.data, out.strides[0], _native.RowType.f32),
    )
    zeros, counts = np.zeros(num_rows, dtype=np.int32), np.full(1, num_rows, dtype=np.int32)
    zero, count = zeros.ctypes.data, counts.ctypes.data
    best, end = np.inf, time.perf_counter() + SECONDS
    while time.perf_counter() < end or best == np.inf:
        start = time.thread_time()
        plan.run(1, 1, 0, zero, zero, count, zero, zero, num_rows, 0, 0, 0)
        best = min(best, time.thread_time() - start)
    return best, num_bytes


def figures(shape: tuple[int, int], num_rows: int, weight_format: str, peaks: Peaks) -> dict[str, Any]:
    seconds, num_bytes = seconds_of(weight_format, *shape, num_rows)
    gmacs = num_rows * shape[0] * shape[1] / seconds / 1e9
    dots = weight_format == "bf16" and _native.isa() == "avx512_bf16"
    return {
        "format": weight_format,
        "outputs": shape[0],
        "inputs": shape[1],
        "rows": num_rows,
        "microseconds": round(seconds * 1e6, 1),
        "gbs": round(num_bytes / seconds / 1e9, 1),
        "gmacs": round(gmacs, 1),
        "share_of_read": round(num_bytes / seconds / 1e9 / peaks.read_gbs, 2),
        "share_of_compute": round(gmacs / (peaks.bf16_gmacs if dots else peaks.fma_gmacs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256,2048")
    parser.add_argument("--shape", action="append", help="outputs x inputs; default 1536x576 and 8192x4096")
    parser.add_argument("--isa", default=_native.isa())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _native.set_isa(arguments.isa)
    peaks = measure()
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shape or ["1536x576", "8192x4096"]]
    if not arguments.json:
        print(f"one thread, {_native.isa()}; {peaks}")
        print("format    N x I        rows        µs    GB/s  of read  GMAC/s  of compute")
    results = []
    for shape in shapes:
        for weight_format in FORMATS:
            for num_rows in map(int, arguments.rows.split(",")):
                found = figures((shape[0], shape[1]), num_rows, weight_format, peaks)
                results.append(found)
                if not arguments.json:
                    print(
                        f"{weight_format:6} {shape[0]:6}x{shape[1]:<6} {num_rows:7} {found['microseconds']:11.1f}"
                        f" {found['gbs']:6.1f} {found['share_of_read']:7.0%} {found['gmacs']:8.1f}"
                        f" {found['share_of_compute']:9.0%}"
                    )
    if arguments.json:
        print(json.dumps({"isa": _native.isa(), "peaks": vars(peaks), "products": results}))


if __name__ == "__main__":
    main()
