"""Speed of packing by format of the file: MB of file per second, and the share of a plain copy of the same bytes.

    python -m benchmarks.packing [--formats Q2_K,BF16] [--threads 2] [--seconds 0.5] [--json]

Each figure is the shortest of several runs of `PackedWeights.fill` on one matrix in memory, by turns with the copy. "Of
idle threads" divides by the processor's time of all threads instead: what they reach when no other process runs, if the
work is spread evenly.
Formats of Hugging Face directories have the layouts of their usual checkpoints: groups of 128, FP8 in blocks of 128.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire._native import CodeLayout, WeightFormat
from quire.kernels.instruction import Packing
from quire.runtime.plan.packed_weights import PACKED_DIRECTLY, PackedWeights, Placement
from quire.weights.quantized import (
    Quantized,
    QuantizedTensor,
    RoundedTensor,
    Rows,
    StoredCodes,
    e4m3_values,
    nvfp4,
)
from quire.weights.weight_tensor import BLOCK_FORMATS, WeightTensor, row_bytes

ROWS, COLUMNS, GROUP = 4096, 2048, 128
RANDOM = np.random.default_rng(0)


def octets(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, np.uint8)


def stored(format_name: str) -> WeightTensor:
    """Random blocks without infinities in their halves."""
    raw = octets(ROWS, row_bytes(BLOCK_FORMATS[format_name], COLUMNS)) & 0xBB
    return WeightTensor(format_name, (ROWS, COLUMNS), format_name, raw)


def mxfp4() -> WeightTensor:
    """Codes and scales in tensors of their own, as gpt-oss has them."""
    return WeightTensor(
        "MXFP4", (ROWS, COLUMNS), "MXFP4", octets(ROWS, COLUMNS // 2), scales=octets(ROWS, COLUMNS // 32) // 2
    )


def quantized(
    name: str, codes: StoredCodes, bits: int, *, zeros: bool = False, groups: np.ndarray | None = None
) -> QuantizedTensor:
    """Scales as GPTQ and AWQ store them, a row for each group; other tools store the transposed matrix."""
    shape = (COLUMNS // GROUP, ROWS)
    scales = WeightTensor("scales", shape, "F16", octets(shape[0], 2 * shape[1]) & 0x3F).transposed()
    grouped = np.arange(COLUMNS) // GROUP if groups is None else groups
    read: Rows | float = (lambda first, last: np.full((last - first, shape[0]), 7, np.uint8)) if zeros else 8.0
    parts = Quantized(codes, scales, read, grouped, bits / 8)
    return QuantizedTensor(name, (ROWS, COLUMNS), name, codes.stored, quantized=parts)


def fp8() -> QuantizedTensor:
    codes = StoredCodes(CodeLayout.across8, octets(ROWS, COLUMNS) & 0xF7)
    scales = WeightTensor("scales", (32, 16), "F32", np.ones((32, 16), np.float32).view(np.uint8))
    groups = np.arange(COLUMNS) // GROUP
    parts = Quantized(codes, scales, 0.0, groups, 1.0, GROUP, table=e4m3_values())
    return QuantizedTensor("FP8", (ROWS, COLUMNS), "FP8", codes.stored, quantized=parts)


def of_directories() -> dict[str, tuple[Callable[[], WeightTensor], WeightFormat]]:
    """Tensors as Hugging Face directories store them, and what they are packed as."""
    down, across = (StoredCodes(layout, octets(*shape)) for layout, shape in (
        (CodeLayout.down4, (COLUMNS // 8, 4 * ROWS)), (CodeLayout.across4, (ROWS, COLUMNS // 2)),
    ))  # fmt: skip
    awq = StoredCodes(CodeLayout.awq, octets(COLUMNS, ROWS // 2))
    wide = StoredCodes(CodeLayout.down8, octets(COLUMNS // 4, 4 * ROWS))
    scales = StoredCodes(CodeLayout.across8, octets(ROWS, COLUMNS // 16) & 0x77)
    shuffled = RANDOM.permutation(COLUMNS) // GROUP
    return {
        "GPTQ 4": (lambda: quantized("Q4_0", down, 4), WeightFormat.q4),
        "GPTQ 4 zeros": (lambda: quantized("Q4_1", down, 4, zeros=True), WeightFormat.q4m),
        "GPTQ 4 act-order": (lambda: quantized("INT4", down, 4, zeros=True, groups=shuffled), WeightFormat.q8),
        "GPTQ 8": (lambda: quantized("Q8_0", wide, 8), WeightFormat.q8),
        "AWQ": (lambda: quantized("Q4_1", awq, 4, zeros=True), WeightFormat.q4m),
        "W4A16": (lambda: quantized("Q4_0", across, 4), WeightFormat.q4),
        "FP8": (fp8, WeightFormat.q8),
        "NVFP4": (lambda: nvfp4("NVFP4", (ROWS, COLUMNS), across, scales, np.float32(1e-3)), WeightFormat.nvfp4),
        "MXFP4 apart": (mxfp4, WeightFormat.mxfp4),
    }


def cases() -> dict[str, tuple[Callable[[], WeightTensor], WeightFormat]]:
    """By name: what makes the stored tensor, and what it is packed as."""
    found: dict[str, tuple[Callable[[], WeightTensor], WeightFormat]] = {}
    for name in BLOCK_FORMATS:
        direct = PACKED_DIRECTLY.get(name)
        found[name if direct else f"{name} -> q8"] = partial(stored, name), direct or WeightFormat.q8
    for name in ("F32", "BF16"):
        for target in (WeightFormat.bf16, WeightFormat.q4m):
            found[f"{name} -> {target.name}"] = partial(stored, name), target
    found["BF16 -> fp8"] = (lambda: RoundedTensor.of(stored("BF16"))), WeightFormat.q8
    found["Q4_K -> f32"] = partial(stored, "Q4_K"), WeightFormat.f32
    return found | of_directories()


def measure(tensor: WeightTensor, target: WeightFormat, num_threads: int, seconds: float) -> tuple[float, float, float]:
    """Seconds of packing, of a copy of the file's bytes, and of the processor's time for packing."""
    weights = PackedWeights({"w": Shaped(tensor.shape)}, {"w": Packing.whole(ROWS, target)}, num_threads)
    source = np.zeros(tensor.num_bytes, np.uint8)
    copy = np.ones_like(source)
    actions = partial(weights.fill, [Placement(tensor, "w", 0)]), partial(np.copyto, copy, source)
    best, cpu, end = [np.inf, np.inf], np.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or np.isinf(best[1]):
        for index, action in enumerate(actions):
            start, cpu_start = time.perf_counter(), time.process_time()
            action()
            best[index] = min(best[index], time.perf_counter() - start)
            cpu = min(cpu, time.process_time() - cpu_start) if index == 0 else cpu
    return best[0], best[1], cpu


@dataclass(frozen=True)
class Shaped:
    """A parameter, as `PackedWeights` sees it."""

    shape: tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", default="", help="names, or parts of names; all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.formats.split(",") if name]
    results = {}
    for name, (make, target) in cases().items():
        if wanted and not any(part in name for part in wanted):
            continue
        tensor = make()
        seconds, copied, cpu = measure(tensor, target, arguments.threads, arguments.seconds)
        results[name] = {"mb_per_s": round(tensor.num_bytes / seconds / 1e6), "of_copy": round(copied / seconds, 3),
                         "million_weights_per_s": round(ROWS * COLUMNS / seconds / 1e6),
                         "mb_of_idle_threads": round(tensor.num_bytes * arguments.threads / cpu / 1e6)}  # fmt: skip
        if not arguments.json:
            one = results[name]
            print(
                f"{name:18} {target.name:6} {one['mb_per_s']:7} MB/s {one['of_copy']:7.1%} of a copy "
                f"{one['million_weights_per_s']:6} million weights/s {one['mb_of_idle_threads']:7} MB/s of idle threads"
            )
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
