"""Attention and the writing of keys and values: decodes by (sequences, context), prompts by their length, and their
shares of what this machine can do, measured in the same run.

    python -m benchmarks.kernels.attention [--formats bf16,i8] [--threads 2] [--decode 1x2048,32x256] [--prompt 512]
        [--heads 9 --kv-heads 3 --head-size 64 --layers 30] [--isa avx2] [--json]

The shapes are SmolLM2's. A figure is for all layers, each of which has its part of one block-major pool, as in the
engine: keys and values come from where they would. "of read" is the share of the speed at which as many threads read
plain memory, "of bf16" that of their BF16 products (on AMX's tiles where there are some).
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from quire import _native
from quire.runtime.huge_pages import allocate
from quire.runtime.machine_limits import MachineLimits, measure_limits

SECONDS = 0.5
"""Spent on each figure; the shortest run counts."""
BLOCK_SIZE = 32
BLOCK_FILL = 0x3C
"""Makes small positive numbers of every format's bytes."""


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_layers: int
    format: str

    @property
    def layer_bytes(self) -> int:
        """Of one block."""
        return _native.kv_layer_bytes(_native.KvFormat[self.format], BLOCK_SIZE, self.num_kv_heads, self.head_size)


@dataclass(frozen=True)
class Figure:
    format: str
    case: str
    threads: int
    write_us: float
    attend_us: float
    gbs: float
    """Of keys and values, counted once: 10⁹ bytes a second."""
    gmacs: float
    """Of scores and weighted sums that causality needs: 10⁹ a second."""
    of_read: float
    of_bf16: float


class Layers:
    """A plan of all layers' `write_kv` (part 1) and `attend` (part 2) for requests that each start at one position."""

    def __init__(self, shape: Shape, num_requests: int, start: int, count: int, num_threads: int) -> None:
        self.num_requests, self.num_threads = num_requests, num_threads
        blocks = -(-(start + count) // BLOCK_SIZE)
        stride = shape.layer_bytes * shape.num_layers
        num_tokens = num_requests * count
        self.memory = torch.from_numpy(allocate(num_requests * blocks * stride)).fill_(BLOCK_FILL)
        base = self.memory.data_ptr()
        order = torch.randperm(num_requests * blocks, generator=torch.Generator().manual_seed(0))
        self.tables = order.int().reshape(num_requests, blocks)
        columns, kv_columns = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        width = columns + 2 * kv_columns
        self.qkv = torch.randn(num_tokens, width)
        self.out = torch.zeros(num_tokens, columns)
        self.angles = torch.rand(2, num_tokens, shape.head_size // 2)
        q, cos, sin = self.qkv.data_ptr(), self.angles[0].data_ptr(), self.angles[1].data_ptr()
        k, v = q + columns * 4, q + (columns + kv_columns) * 4
        rows = _native.Rows(self.out.data_ptr(), columns * 4, _native.RowType.f32)
        self.plan = _native.Plan(num_threads, num_tokens, num_requests)
        for layer in range(shape.num_layers):
            kv = _native.KvLayer(
                base + layer * shape.layer_bytes, stride, BLOCK_SIZE, shape.num_kv_heads, shape.head_size,
                _native.KvFormat[shape.format], 0,
            )  # fmt: skip
            half = shape.head_size // 2
            self.plan.write_kv(q, k, v, width, width, width, shape.num_heads, 0, 0, 0.0, cos, sin, half, kv, parts=1)
            self.plan.attend(q, width, rows, shape.num_heads, 0, shape.head_size**-0.5, kv, parts=2)
        ones = torch.ones(num_requests, dtype=torch.int32)
        self.arrays = [torch.arange(num_requests, dtype=torch.int32), ones * start, ones * count]
        self.tokens = torch.zeros(num_requests, start + count, dtype=torch.int32)

    def seconds(self, part: int) -> float:
        """The shortest run: CPU time if there is one thread."""
        now = time.thread_time if self.num_threads == 1 else time.perf_counter
        addresses = [array.data_ptr() for array in self.arrays]
        best, end = float("inf"), time.perf_counter() + SECONDS
        while time.perf_counter() < end or best == float("inf"):
            started = now()
            self.plan.run(
                part, self.num_requests, 0, *addresses, 0, self.tokens.data_ptr(), self.tokens.stride(0),
                self.tables.data_ptr(), self.tables.stride(0), self.tables.numel(),
            )  # fmt: skip
            best = min(best, now() - started)
        return best


def figure(shape: Shape, case: str, requests: tuple[int, int, int], num_threads: int, limits: MachineLimits) -> Figure:
    num_requests, start, count = requests
    layers = Layers(shape, num_requests, start, count, num_threads)
    write, attend = layers.seconds(1), layers.seconds(2)
    token_bytes = shape.layer_bytes * shape.num_layers / BLOCK_SIZE
    pairs = num_requests * (count * start + count * (count + 1) // 2)
    gbs = num_requests * (start + count) * token_bytes / attend / 1e9
    gmacs = pairs * 2 * shape.num_heads * shape.head_size * shape.num_layers / attend / 1e9
    return Figure(
        shape.format, case, num_threads, round(write * 1e6, 1), round(attend * 1e6, 1), round(gbs, 1), round(gmacs, 1),
        round(gbs * 1e9 / limits.read_bytes_per_s, 2), round(2 * gmacs * 1e9 / limits.flops_per_s["bf16"], 2),
    )  # fmt: skip


def cases(decode: str, prompt: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for text in filter(None, decode.split(",")):
        sequences, context = map(int, text.split("x"))
        yield f"decode {text}", (sequences, context - 1, 1)
    for text in filter(None, prompt.split(",")):
        yield f"prompt {text}", (1, 0, int(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", default="bf16,i8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--decode", default="1x16,1x128,1x512,1x2048,8x512,32x256", help="sequences x context")
    parser.add_argument("--prompt", default="128,512,2048")
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--isa", default=_native.isa())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _native.set_isa(arguments.isa)
    if not arguments.json:
        print("format  threads  case              write µs  attend µs   GB/s  of read  GMAC/s  of bf16")
    figures = []
    for num_threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(num_threads)
        limits = measure_limits("cpu", ("bf16",))
        if not arguments.json:
            print(f"{_native.isa()}, {num_threads} threads: {limits}")
        for name in arguments.formats.split(","):
            shape = Shape(arguments.heads, arguments.kv_heads, arguments.head_size, arguments.layers, name)
            for case, requests in cases(arguments.decode, arguments.prompt):
                row = figure(shape, case, requests, num_threads, limits)
                figures.append(asdict(row))
                if not arguments.json:
                    print(
                        f"{row.format:6}  {row.threads:7}  {row.case:16}  {row.write_us:8.0f}  {row.attend_us:9.0f}  "
                        f"{row.gbs:5.1f}  {row.of_read:7.0%}  {row.gmacs:6.1f}  {row.of_bf16:7.0%}"
                    )
    if arguments.json:
        print(json.dumps({"isa": _native.isa(), "figures": figures}))


if __name__ == "__main__":
    main()
