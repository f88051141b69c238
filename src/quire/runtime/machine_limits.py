"""Limits of this machine, measured: bytes read from memory, and operations in each arithmetic, per second.

A speed is quoted as a share of these. On a CPU they are the engine's own instructions on registers, with the engine's
threads (`native/ops/peak.h`): no product can be faster. On a GPU they are a large product of PyTorch's. Must not know
models: `insight/explain/phases.py` divides a step's work by these limits.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.lazy_torch import torch
from quire.runtime.hardware import cgroup_limits, count_threads
from quire.runtime.huge_pages import allocate

REPETITIONS = 5
MIN_MEASURE_S = 0.2
"""Of each native measurement: on a busy machine the runs of a shorter one all wait for a processor."""
MATRIX_SIZE = 2048
ROUNDS = 200_000
"""Of a native measurement: some milliseconds."""
READ_BYTES = 256 * 2**20
"""More than any cache of a small machine holds: weights are read from memory, too."""
MIN_READ_BYTES = 2**20
NATIVE_KINDS = ("fp32", "bf16", "int8", "read")
"""In the order of `PeakOp::kind`."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""PyTorch's names, for products of PyTorch's."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Bytes per second read from memory, and per arithmetic ("int8", "bf16", "fp32") operations per second."""

    read_bytes_per_s: float
    flops_per_s: Mapping[str, float]


def measure_limits(device: str, arithmetics: Collection[str], working_set: int = READ_BYTES) -> MachineLimits:
    """Measure on a device: the best of some repetitions each, about a second.

    `working_set`: bytes that are read again and again, as the weights of a model, which a cache may hold.
    """
    num_bytes = min(max(working_set, MIN_READ_BYTES), READ_BYTES)
    if device != "cpu":
        values = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        read_s = _best_time(lambda: values.sum(), device)
        return MachineLimits(values.nbytes / read_s, {name: _product_rate(device, name) for name in arithmetics})
    data = _ones(num_bytes)
    rates = {name: 2 * _native_rate(name, data) for name in arithmetics if name in NATIVE_KINDS}
    rates |= {name: _product_rate(device, name) for name in arithmetics if name not in NATIVE_KINDS}
    return MachineLimits(_native_rate("read", data), rates)


def read_rate(working_set_bytes: int) -> float:
    """Bytes per second that all threads read from a working set of this size, which a cache may hold."""
    return _native_rate("read", _ones(working_set_bytes))


def _ones(num_bytes: int) -> NDArray[np.float32]:
    """Return memory on huge pages, as weights have: from small pages the same bytes are read more slowly."""
    data = allocate(num_bytes // 4 * 4).view(np.float32)
    data[:] = 1
    return data


def _native_rate(kind: str, data: NDArray[np.float32]) -> float:
    """Multiply-adds, or bytes read, per second of all threads."""
    plan = _native.Plan(count_threads(cgroup_limits().num_cpus), 1, 1)
    operations, times = np.zeros(plan.num_threads, np.int64), np.zeros(1, np.int64)
    plan.peak(NATIVE_KINDS.index(kind), ROUNDS, data.ctypes.data, data.nbytes, operations.ctypes.data)
    best, num_runs, end_s = 0.0, 0, time.perf_counter() + MIN_MEASURE_S
    while num_runs <= REPETITIONS or time.perf_counter() < end_s:
        num_runs += 1
        plan.run(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, nanoseconds=times.ctypes.data)
        best = max(best, float(operations.sum()) / float(times[0]) * 1e9)
    return best


def _product_rate(device: str, arithmetic: str) -> float:
    left = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=getattr(torch, DTYPES[arithmetic]), device=device)
    right = torch.ones_like(left)
    return 2 * MATRIX_SIZE**3 / _best_time(lambda: left @ right, device)


def _best_time(run: Callable[[], object], device: str) -> float:
    """Seconds of the fastest repetition; the first, which also allocates, does not count."""
    times = []
    for _ in range(REPETITIONS + 1):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
