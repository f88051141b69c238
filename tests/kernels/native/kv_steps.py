"""Steps of the native `write_kv` and `attend` for tests and benchmarks: a pool, block tables, and one call per step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from quire import _native

ISAS = [isa for isa in ("scalar", "avx2", "avx512", "avx512_bf16") if _native.isa_supported(isa)]
FORMATS = ("f32", "f16", "bf16", "i8")
ROW_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "q8": torch.uint8}
ACT_BLOCK = np.dtype(
    [("q", np.int8, 32), ("scale", np.float32), ("scaled_sum", np.float32), ("sum", np.int32), ("unused", np.int32)]
)


@contextmanager
def instruction_set(isa: str) -> Iterator[None]:
    before = _native.isa()
    _native.set_isa(isa)
    try:
        yield
    finally:
        _native.set_isa(before)


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 32
    format: str = "bf16"

    @property
    def width(self) -> int:
        """Values of one token: queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


@dataclass(frozen=True)
class Extras:
    """What `write_kv` does to queries and keys, and how `attend` looks back."""

    window: int = 0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    frequencies: torch.Tensor | None = None
    epsilon: float = 1e-6
    out_type: str = "f32"


@dataclass
class Pool:
    """Blocks of one layer, NaN wherever nothing was written, and block tables of `max_lengths` tokens each."""

    shape: Shape
    max_lengths: Sequence[int]
    seed: int = 0
    memory: torch.Tensor = field(init=False)
    tables: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        needed = [-(-length // shape.block_size) for length in self.max_lengths]
        self.block_bytes = _native.kv_layer_bytes(
            _native.KvFormat[shape.format], shape.block_size, shape.num_kv_heads, shape.head_size
        )
        # Two layers' blocks side by side: this one's stride is larger than its bytes.
        self.stride_bytes = 2 * self.block_bytes
        num_blocks = sum(needed) + 3
        # 0xff is NaN in all formats and -1 as int8.
        self.memory = torch.full((num_blocks * self.stride_bytes + 64,), 0xFF, dtype=torch.uint8)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(self.seed)) + 1
        order = order.tolist()
        order.remove(num_blocks - 1)
        order.append(num_blocks - 1)  # the last request gets the largest id
        self.tables = torch.zeros(len(needed), max(*needed, 1) + 1, dtype=torch.int32)
        for row, count in enumerate(needed):
            for i in range(count):
                self.tables[row, i] = order.pop()

    @property
    def address(self) -> int:
        return (self.memory.data_ptr() + 63) // 64 * 64

    def layer(self) -> _native.KvLayer:
        shape = self.shape
        return _native.KvLayer(
            self.address,
            self.stride_bytes,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_size,
            _native.KvFormat[shape.format],
            0,
        )


class Runner:
    """A plan of the two ops over buffers of `max_tokens` rows."""

    def __init__(self, pool: Pool, extras: Extras, *, max_tokens: int, num_threads: int, parts: int = 3) -> None:
        shape = pool.shape
        self.pool, self.parts = pool, parts
        self.qkv = torch.zeros(max_tokens, shape.width)
        columns = shape.num_heads * shape.head_size
        self.out = torch.zeros(max_tokens, row_bytes(extras.out_type, columns), dtype=torch.uint8)
        self.out_type, self.columns = extras.out_type, columns
        self.plan = _native.Plan(num_threads, max_tokens, max(len(pool.max_lengths), 1))
        self._kept = [extras]
        cos = sin = 0
        if extras.frequencies is not None:
            half = shape.head_size // 2
            self.angles = torch.zeros(2, max_tokens, half)
            cos, sin = self.angles[0].data_ptr(), self.angles[1].data_ptr()
            self.plan.rotary(extras.frequencies.data_ptr(), cos, sin, half, parts=1)
        q = self.qkv.data_ptr()
        k = q + columns * 4
        v = k + shape.num_kv_heads * shape.head_size * 4
        self.plan.write_kv(
            q, k, v, shape.width, shape.num_heads, address(extras.q_norm), address(extras.k_norm), extras.epsilon,
            cos, sin, pool.layer(), parts=1,
        )  # fmt: skip
        out = _native.Rows(self.out.data_ptr(), self.out.stride(0), _native.RowType[extras.out_type])
        self.plan.attend(
            q, shape.width, out, shape.num_heads, extras.window, shape.head_size**-0.5, pool.layer(), parts=2
        )

    def prepare(self, requests: Sequence[tuple[int, int, int]]) -> None:
        """Of (row of the tables, first position, number of tokens)."""
        self.requests = requests
        self.arrays = [torch.tensor([r[i] for r in requests], dtype=torch.int32) for i in range(3)]
        self.tokens = torch.zeros(len(self.pool.max_lengths), max(self.pool.max_lengths) + 1, dtype=torch.int32)

    def run(self, parts: int | None = None) -> None:
        rows, starts, counts = (array.data_ptr() for array in self.arrays)
        tables = self.pool.tables
        self.plan.run(
            self.parts if parts is None else parts, len(self.requests), 0, rows, starts, counts, 0,
            self.tokens.data_ptr(), self.tokens.stride(0), tables.data_ptr(), tables.stride(0), tables.numel(),
        )  # fmt: skip


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def row_bytes(row_type: str, columns: int) -> int:
    if row_type == "q8":
        return columns // 32 * ACT_BLOCK.itemsize
    return columns * (4 if row_type == "f32" else 2)


def run_step(
    pool: Pool,
    requests: Sequence[tuple[int, int, int]],
    qkv: torch.Tensor,
    extras: Extras | None = None,
    *,
    num_threads: int = 1,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write and attend: the raw bytes of the output rows, and queries and keys as they were left in `qkv`."""
    extras = extras or Extras()
    with instruction_set(isa or _native.isa()):
        runner = Runner(pool, extras, max_tokens=max(len(qkv), 1), num_threads=num_threads)
        runner.qkv[: len(qkv)] = qkv
        runner.prepare(requests)
        runner.run()
    return runner.out[: len(qkv)].clone(), runner.qkv[: len(qkv)].clone()


def as_floats(rows: torch.Tensor, out_type: str) -> torch.Tensor:
    """Output rows of any type as [T, H * D] fp32."""
    if out_type == "q8":
        blocks = rows.numpy().view(ACT_BLOCK)
        return torch.from_numpy(blocks["q"] * blocks["scale"][..., None]).reshape(len(rows), -1).float()
    return rows.view(ROW_TYPES[out_type]).float()
