"""Time of native attention: decodes by (sequences, context), and prompts by their number of tokens.

    python benchmarks/kernels/attention.py [--threads 1,2] [--formats bf16,i8] [--heads 9 --kv-heads 3 --head-size 64]
        [--decode 1x128,1x2048,32x256] [--prefill 512,2048] [--layers 30] [--isa NAME] [--json]

One plan holds the attention of all layers, each with its own part of one block-major pool as in the engine, so that
keys and values come from where they would. Best of some runs. Decode: GB/s of keys and values read, beside what
summing a large tensor reaches on one thread per thread; prompt: GFLOP/s of the scores and sums that causality needs.
Next to read: `native/ops/attend.h`.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire import _native

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_layers: int
    format: str


class Case:
    """A plan of all layers' `write_kv` (part 1) and `attend` (part 2) for requests of (first position, tokens)."""

    def __init__(self, shape: Shape, requests: list[tuple[int, int]], num_threads: int) -> None:
        self.shape, self.requests = shape, requests
        num_tokens = sum(count for _, count in requests)
        blocks = [-(-(start + count) // BLOCK_SIZE) for start, count in requests]
        layer_bytes = _native.kv_layer_bytes(
            _native.KvFormat[shape.format], BLOCK_SIZE, shape.num_kv_heads, shape.head_size
        )
        stride = layer_bytes * shape.num_layers
        # A valid pattern everywhere: 0x3c3c is a small number in every format.
        self.memory = torch.full((sum(blocks) * stride + 64,), 0x3C, dtype=torch.uint8)
        base = (self.memory.data_ptr() + 63) // 64 * 64
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).int()
        self.tables = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
        for row, part in enumerate(order.split(blocks)):
            self.tables[row, : len(part)] = part
        columns = shape.num_heads * shape.head_size
        width = columns + 2 * shape.num_kv_heads * shape.head_size
        self.qkv = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(1))
        self.out = torch.zeros(num_tokens, columns)
        self.angles = torch.rand(2, num_tokens, shape.head_size // 2)
        self.plan = _native.Plan(num_threads, num_tokens, len(requests))
        q = self.qkv.data_ptr()
        k = q + columns * 4
        v = k + shape.num_kv_heads * shape.head_size * 4
        rows = _native.Rows(self.out.data_ptr(), columns * 4, _native.RowType.f32)
        for layer in range(shape.num_layers):
            kv = _native.KvLayer(
                base + layer * layer_bytes,
                stride,
                BLOCK_SIZE,
                shape.num_kv_heads,
                shape.head_size,
                _native.KvFormat[shape.format],
                0,
            )
            cos, sin = self.angles[0].data_ptr(), self.angles[1].data_ptr()
            self.plan.write_kv(q, k, v, width, shape.num_heads, 0, 0, 0.0, cos, sin, kv, parts=1)
            self.plan.attend(q, width, rows, shape.num_heads, 0, shape.head_size**-0.5, kv, parts=2)
        self.arrays = [torch.arange(len(requests), dtype=torch.int32)]
        self.arrays += [torch.tensor([request[i] for request in requests], dtype=torch.int32) for i in range(2)]
        self.tokens = torch.zeros(len(requests), max(start + count for start, count in requests), dtype=torch.int32)

    def run(self, parts: int) -> None:
        rows, starts, counts = (array.data_ptr() for array in self.arrays)
        self.plan.run(
            parts, len(self.requests), 0, rows, starts, counts, 0, self.tokens.data_ptr(), self.tokens.stride(0),
            self.tables.data_ptr(), self.tables.stride(0), self.tables.numel(),
        )  # fmt: skip

    def seconds(self, parts: int) -> float:
        return best_seconds(lambda: self.run(parts))

    def read_bytes(self) -> int:
        token_bytes = _native.kv_layer_bytes(
            _native.KvFormat[self.shape.format], BLOCK_SIZE, self.shape.num_kv_heads, self.shape.head_size
        )
        tokens = sum(start + count for start, count in self.requests)
        return tokens * token_bytes // BLOCK_SIZE * self.shape.num_layers

    def operations(self) -> int:
        """Multiplications and additions of scores and weighted sums."""
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in self.requests)
        return 4 * pairs * self.shape.num_heads * self.shape.head_size * self.shape.num_layers


def best_seconds(function: Callable[[], object], budget_s: float = 0.8) -> float:
    """The shortest of the runs that fit in a time, at least two."""
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 2 or spent < budget_s:
        started = time.perf_counter()
        function()
        elapsed = time.perf_counter() - started
        best, spent, runs = min(best, elapsed), spent + elapsed, runs + 1
    return best


def read_bandwidth() -> float:
    """Bytes a second that one thread reads from memory, by summing."""
    torch.set_num_threads(1)
    values = torch.ones(32 << 20)
    return values.numel() * 4 / best_seconds(values.sum)


def matmul_peak() -> float:
    """Operations a second of torch's bf16 matrix product on one thread."""
    torch.set_num_threads(1)
    a = torch.randn(1024, 1024).bfloat16()
    return 2 * 1024**3 / best_seconds(lambda: a @ a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--formats", default="bf16,i8")
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--decode", default="1x128,1x512,1x2048,8x512,32x256")
    parser.add_argument("--prefill", default="128,512,2048")
    parser.add_argument("--isa")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.isa:
        _native.set_isa(arguments.isa)
    bandwidth, peak = read_bandwidth(), matmul_peak()
    results = []
    for name in arguments.formats.split(","):
        shape = Shape(arguments.heads, arguments.kv_heads, arguments.head_size, arguments.layers, name)
        for num_threads in map(int, arguments.threads.split(",")):
            for text in filter(None, arguments.decode.split(",")):
                sequences, context = map(int, text.split("x"))
                case = Case(shape, [(context - 1, 1)] * sequences, num_threads)
                write, attend = case.seconds(1), case.seconds(2)
                rate = case.read_bytes() / attend
                results.append(
                    {"format": name, "threads": num_threads, "case": f"decode {text}", "write_us": write * 1e6,
                     "attend_us": attend * 1e6, "rate": rate / 1e9, "unit": "GB/s",
                     "share": rate / bandwidth / num_threads}
                )  # fmt: skip
            for text in filter(None, arguments.prefill.split(",")):
                case = Case(shape, [(0, int(text))], num_threads)
                write, attend = case.seconds(1), case.seconds(2)
                rate = case.operations() / attend
                results.append(
                    {"format": name, "threads": num_threads, "case": f"prompt {text}", "write_us": write * 1e6,
                     "attend_us": attend * 1e6, "rate": rate / 1e9, "unit": "GFLOP/s",
                     "share": rate / peak / num_threads}
                )  # fmt: skip
    machine = {"read_gb_s": bandwidth / 1e9, "bf16_matmul_gflop_s": peak / 1e9, "isa": _native.isa()}
    if arguments.json:
        print(json.dumps({"machine": machine, "results": results}))
        return
    print(
        f"one thread: reads {bandwidth / 1e9:.1f} GB/s, torch's bf16 matmul {peak / 1e9:.0f} GFLOP/s; {_native.isa()}"
    )
    print(f"{'':4} {'threads':>7} {'':14} {'write µs':>9} {'attend µs':>10} {'':>16} {'share':>6}")
    for row in results:
        print(
            f"{row['format']:4} {row['threads']:7} {row['case']:14} {row['write_us']:9.0f} {row['attend_us']:10.0f}"
            f" {row['rate']:8.1f} {row['unit']:7} {row['share']:6.0%}"
        )


if __name__ == "__main__":
    main()
