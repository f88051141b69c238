"""Attention of decodes and prompts: microseconds, and shares of what this machine can do at the same time.

    python -m benchmarks.kernels.attention [--formats bf16,i8] [--threads 2] [--decode 8x2048,32x1024] [--prompt 512]
        [--drafts 1x1024,4x1024,16x1024] [--heads 9 --kv-heads 3 --head-size 64 --layers 30] [--isa avx2] [--json]

The shapes are SmolLM2's. A case NxC of --drafts verifies a draft: the last N tokens of one request with C tokens. A
figure is for all layers, each of which has its part of one block-major pool, as in the engine. "of read" is the
median, over turns, of the attention's bytes per second divided by those of a plain read of the same memory just
before it: other guests change a machine's memory speed by half within minutes. "of bf16" is the share of BF16
products on registers.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch

from quire import _native
from quire.runtime.huge_pages import allocate
from quire.runtime.machine_limits import NATIVE_KINDS, measure_limits

TURNS = 25
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
    microseconds: float
    gbs: float
    """Of keys and values, counted once: 10⁹ bytes a second."""
    read_gbs: float
    of_read: float
    gmacs: float
    """Of scores and weighted sums that causality needs: 10⁹ a second."""
    of_bf16: float


class Layers:
    """A plan of all layers' `attend` for requests that each start at one position, and one that reads their memory."""

    def __init__(self, shape: Shape, num_requests: int, start: int, count: int, num_threads: int) -> None:
        blocks = -(-(start + count) // BLOCK_SIZE)
        stride = shape.layer_bytes * shape.num_layers
        num_tokens = num_requests * count
        self.memory = allocate(num_requests * blocks * stride)
        self.memory[:] = BLOCK_FILL
        order = torch.randperm(num_requests * blocks, generator=torch.Generator().manual_seed(0))
        self.tables = order.int().reshape(num_requests, blocks)
        columns = shape.num_heads * shape.head_size
        self.q, self.out = torch.randn(num_tokens, columns), torch.zeros(num_tokens, columns)
        rows = _native.Rows(self.out.data_ptr(), columns * 4, _native.RowType.f32)
        self.attending, self.reading = (_native.Plan(num_threads, num_tokens, num_requests) for _ in range(2))
        for layer in range(shape.num_layers):
            kv = _native.KvLayer(
                self.memory.ctypes.data + layer * shape.layer_bytes, stride, BLOCK_SIZE, shape.num_kv_heads,
                shape.head_size, _native.KvFormat[shape.format], 0,
            )  # fmt: skip
            self.attending.attend(self.q.data_ptr(), columns, rows, shape.num_heads, 0, shape.head_size**-0.5, kv)
        self.operations = np.zeros(num_threads, np.int64)
        read = NATIVE_KINDS.index("read")
        self.reading.peak(read, 1, self.memory.ctypes.data, self.memory.nbytes, self.operations.ctypes.data)
        ones = torch.ones(num_requests, dtype=torch.int32)
        self.arrays = [torch.arange(num_requests, dtype=torch.int32), ones * start, ones * count]
        self.tokens = torch.zeros(num_requests, start + count, dtype=torch.int32)

    def seconds(self, plan: _native.Plan) -> float:
        rows, starts, counts = (array.data_ptr() for array in self.arrays)
        started = time.perf_counter()
        plan.run(
            1, len(self.tables), 0, rows, starts, counts, 0, self.tokens.data_ptr(), self.tokens.stride(0),
            self.tables.data_ptr(), self.tables.stride(0), self.tables.numel(),
        )  # fmt: skip
        return time.perf_counter() - started


def figure(shape: Shape, case: str, num_threads: int, bf16_per_s: float) -> Figure:
    kind, _, size = case.partition(" ")
    number, _, length = size.rpartition("x")
    context = int(length)
    requests = int(number) if kind == "decode" else 1
    count = {"decode": 1, "drafts": int(number or 0), "prompt": context}[kind]
    start = context - count
    layers = Layers(shape, requests, start, count, num_threads)
    turns = [(layers.seconds(layers.reading), layers.seconds(layers.attending)) for _ in range(TURNS + 1)][1:]
    num_bytes = requests * context * shape.layer_bytes * shape.num_layers / BLOCK_SIZE
    seconds, of_read = median(turn[1] for turn in turns), median(read / turn for read, turn in turns)
    pairs = requests * (count * start + count * (count + 1) // 2)
    gmacs = pairs * 2 * shape.num_heads * shape.head_size * shape.num_layers / seconds / 1e9
    return Figure(
        shape.format, case, round(seconds * 1e6, 1), round(num_bytes / seconds / 1e9, 1),
        round(layers.memory.nbytes / median(turn[0] for turn in turns) / 1e9, 1),
        round(of_read * num_bytes / layers.memory.nbytes, 3), round(gmacs, 1), round(2e9 * gmacs / bf16_per_s, 3),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", default="bf16,i8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode", default="8x2048,32x1024", help="sequences x context")
    parser.add_argument("--prompt", default="512,2048")
    parser.add_argument("--drafts", default="", help="tokens verified x context")
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--isa", default=_native.isa())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _native.set_isa(arguments.isa)
    torch.set_num_threads(arguments.threads)
    bf16_per_s = measure_limits("cpu", ("bf16",)).flops_per_s["bf16"]
    if not arguments.json:
        print(f"{_native.isa()}, {arguments.threads} threads")
        print("format  case                   µs   GB/s  read GB/s  of read  GMAC/s  of bf16")
    cases = [f"decode {size}" for size in arguments.decode.split(",") if size]
    cases += [f"drafts {size}" for size in arguments.drafts.split(",") if size]
    cases += [f"prompt {size}" for size in arguments.prompt.split(",") if size]
    figures = []
    for name in arguments.formats.split(","):
        shape = Shape(arguments.heads, arguments.kv_heads, arguments.head_size, arguments.layers, name)
        for case in cases:
            row = figure(shape, case, arguments.threads, bf16_per_s)
            figures.append(asdict(row))
            if not arguments.json:
                print(
                    f"{row.format:6}  {row.case:15} {row.microseconds:9.0f}  {row.gbs:5.1f}  {row.read_gbs:9.1f}  "
                    f"{row.of_read:7.0%}  {row.gmacs:6.1f}  {row.of_bf16:7.0%}"
                )
    if arguments.json:
        print(json.dumps({"isa": _native.isa(), "figures": figures}))


if __name__ == "__main__":
    main()
