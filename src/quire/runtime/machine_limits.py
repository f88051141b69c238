"""Measured limits of this machine: speed of reading memory, speed of matrix products.

Benchmarks quote speeds as shares of these limits: what PyTorch reaches here with the engine's threads, not the
manufacturer's figures. Must not know models: `cli/bench_limits.py` turns limits into tokens per second.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.runtime.dtypes import TORCH_DTYPES

REPETITIONS = 5
MATRIX_SIZE = 2048
READ_BYTES = 256 * 2**20
"""More than any cache of a small machine holds: weights are read from memory, too."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Bytes per second read from memory, and floating-point operations per second of a large matrix product."""

    read_bytes_per_s: float
    flops_per_s: float


def measure_limits(device: str, dtype: str) -> MachineLimits:
    """Measure both on a device, the product in a compute dtype: the best of a few repetitions, about a second."""
    data = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    left = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=TORCH_DTYPES[dtype], device=device)
    right = torch.ones_like(left)
    read_s = _best_time(lambda: data.sum(), device)
    product_s = _best_time(lambda: left @ right, device)
    return MachineLimits(READ_BYTES / read_s, 2 * MATRIX_SIZE**3 / product_s)


def _best_time(run: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of the fastest repetition; the first, which also allocates, does not count."""
    times = []
    for _ in range(REPETITIONS + 1):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
