"""Steps of the native `write_kv` and `attend`: a pool full of NaN, block tables, and one call per step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from quire import _native
from tests.kernels.native.packed_weights import ACT_BLOCK

FORMATS = ("f32", "f16", "bf16", "i8")
ALL_FORMATS = (*FORMATS, "e4m3", "e5m2")
"""FP8 shares all code but its loads and stores with f16."""
FLOAT_DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}  # fmt: skip
Requests = Sequence[tuple[int, int, int]]
"""Of one step: (row of the block tables, first position, number of tokens)."""


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 32
    format: str = "bf16"

    @property
    def widths(self) -> list[int]:
        """Return the widths of one token's queries, keys and values."""
        return [self.num_heads * self.head_size] + 2 * [self.num_kv_heads * self.head_size]

    @property
    def block_bytes(self) -> int:
        return _native.kv_layer_bytes(_native.KvFormat[self.format], self.block_size, self.num_kv_heads, self.head_size)


@dataclass(frozen=True)
class Extras:
    """Work of `write_kv` on queries and keys, the window of `attend`, and the type of its rows."""

    window: int = 0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    frequencies: torch.Tensor | None = None
    epsilon: float = 1e-6
    out_type: str = "f32"
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    batch_invariant: bool = True


@dataclass
class Pool:
    """One layer's blocks among those of another layer, and block tables for requests of up to `max_lengths` tokens.

    Every byte that is not written is `fill`: 0xFF is NaN as a float and -1 as a byte. The last request owns the block
    with the largest id.
    """

    shape: Shape
    max_lengths: Sequence[int]
    fill: int = 0xFF
    memory: torch.Tensor = field(init=False)
    tables: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        needed = [-(-length // self.shape.block_size) for length in self.max_lengths]
        num_blocks = sum(needed) + 2
        self.stride_bytes = 2 * self.shape.block_bytes
        self.memory = torch.full((num_blocks * self.stride_bytes + 64,), self.fill, dtype=torch.uint8)
        ids = torch.randperm(num_blocks - 2, generator=torch.Generator().manual_seed(num_blocks)) + 1
        ids = [*ids.tolist()[1:], num_blocks - 1]
        # Tables of two groups of layers: this layer's is the second.
        self.tables_of_groups = torch.zeros(2, len(needed), max(needed) + 1, dtype=torch.int32)
        self.tables = self.tables_of_groups[1]
        for row, count in reversed(list(enumerate(needed))):
            for i in reversed(range(count)):
                self.tables[row, i] = ids.pop()

        self.num_blocks, self.first_byte = num_blocks, -self.memory.data_ptr() % 64

    @property
    def bytes(self) -> torch.Tensor:
        """The pool from its first block on, which starts at a multiple of 64 bytes."""
        return self.memory[self.first_byte :]

    def layer(self) -> _native.KvLayer:
        shape = self.shape
        return _native.KvLayer(
            self.bytes.data_ptr(), self.stride_bytes, shape.block_size, shape.num_kv_heads, shape.head_size,
            _native.KvFormat[shape.format], 1,
        )  # fmt: skip


def zeroed_bytes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


class Runner:
    """A plan of `write_kv` (part 1) and `attend` (part 2) over one buffer of queries, keys and values."""

    def __init__(
        self,
        pool: Pool,
        extras: Extras,
        *,
        max_tokens: int,
        num_threads: int = 1,
        allocate: Callable[[int], torch.Tensor] = zeroed_bytes,
    ) -> None:
        shape, widths = pool.shape, pool.shape.widths
        self.pool, self.extras = pool, extras
        self.qkv = allocate(max_tokens * sum(widths) * 4).view(torch.float32).view(max_tokens, -1)
        self.out = allocate(max_tokens * row_bytes(extras.out_type, widths[0])).view(max_tokens, -1)
        half = shape.head_size // 2 if extras.frequencies is None else len(extras.frequencies)
        self.angles = torch.zeros(2, max_tokens, half)
        self.plan = _native.Plan(num_threads, max_tokens, len(pool.max_lengths))
        if not extras.batch_invariant and _native.has_tiles():
            self.plan.set_tile_rows(1)
        cos = sin = 0
        if extras.frequencies is not None:
            cos, sin = self.angles[0].data_ptr(), self.angles[1].data_ptr()
            self.plan.rotary(extras.frequencies.data_ptr(), cos, sin, half)
        q = self.qkv.data_ptr()
        k = q + widths[0] * 4
        self.plan.write_kv(
            q, k, k + widths[1] * 4, *[sum(widths)] * 3, shape.num_heads, address(extras.q_norm),
            address(extras.k_norm), extras.epsilon, cos, sin, half, pool.layer(), parts=1,
        )  # fmt: skip
        out = _native.Rows(self.out.data_ptr(), self.out.stride(0), _native.RowType[extras.out_type])
        self.plan.attend(
            q,
            sum(widths),
            out,
            shape.num_heads,
            extras.window,
            shape.head_size**-0.5,
            pool.layer(),
            soft_cap=extras.soft_cap,
            sinks=address(extras.sinks),
            parts=2,
        )

    def run(self, requests: Requests, parts: int = 3) -> None:
        arrays = [torch.tensor([request[i] for request in requests], dtype=torch.int32) for i in range(3)]
        rows, starts, counts = (array.data_ptr() for array in arrays)
        tables = self.pool.tables_of_groups
        tokens = torch.zeros(len(self.pool.max_lengths), max(self.pool.max_lengths), dtype=torch.int32)
        self.plan.run(
            parts, len(requests), 0, rows, starts, counts, 0, tokens.data_ptr(), tokens.stride(0),
            tables.data_ptr(), tables.stride(1), tables.stride(0),
        )  # fmt: skip


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def row_bytes(row_type: str, columns: int) -> int:
    if row_type == "q8":
        return columns // 32 * ACT_BLOCK.itemsize
    return columns * (4 if row_type == "f32" else 2)


def random_tokens(shape: Shape, lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys and values of all positions of some requests: [length, H D + 2 K D] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, sum(shape.widths), generator=generator) for length in lengths]


def run_steps(
    pool: Pool,
    tokens: Sequence[torch.Tensor],
    steps: Sequence[Requests],
    extras: Extras | None = None,
    *,
    num_threads: int = 1,
) -> list[torch.Tensor]:
    """Outputs of all positions of all requests, as bytes; zero where no step computed them."""
    extras = extras or Extras()
    most = max(sum(count for _, _, count in step) for step in steps)
    runner = Runner(pool, extras, max_tokens=most, num_threads=num_threads)
    outputs = [torch.zeros(len(rows), runner.out.shape[1], dtype=torch.uint8) for rows in tokens]
    for step in steps:
        used = torch.cat([tokens[row][start : start + count] for row, start, count in step])
        runner.qkv[: len(used)] = used
        runner.run(step)
        first = 0
        for row, start, count in step:
            outputs[row][start : start + count] = runner.out[first : first + count]
            first += count
    return outputs


def as_stored(x: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Keys or values [..., D] as a format holds them, widened to fp64."""
    if kv_format == "i8":
        highest = x.abs().amax(-1, keepdim=True)
        scaled = (x * torch.where(highest > 0, 127.0 / highest, 0.0)).round()
        return scaled.double() * (highest / 127.0).double()
    return x.to(FLOAT_DTYPES[kv_format]).double()


def split(tokens: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [heads, T, D] of one request, keys and values once for each query head."""
    q, k, v = (part.unflatten(1, (-1, shape.head_size)).transpose(0, 1) for part in tokens.split(shape.widths, 1))
    group = shape.num_heads // shape.num_kv_heads
    return q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)


def attention(tokens: torch.Tensor, shape: Shape, extras: Extras, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[T, H D] of one request, over keys and values as the pool's format holds them."""
    q, k, v = split(tokens, shape)
    k, v = as_stored(k, shape.format).to(dtype), as_stored(v, shape.format).to(dtype)
    scores = q.to(dtype) @ k.transpose(1, 2) * shape.head_size**-0.5
    if extras.soft_cap:
        scores = extras.soft_cap * torch.tanh(scores / extras.soft_cap)
    scores = scores.masked_fill(~visible(len(tokens), extras.window), -torch.inf)
    if extras.sinks is not None:
        scores = torch.cat([scores, extras.sinks.to(dtype)[:, None, None].expand(-1, len(tokens), 1)], -1)
    return (scores.softmax(-1)[..., : len(tokens)] @ v).transpose(0, 1).flatten(1)


def check_nan_stays(
    outputs: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], shape: Shape, lengths: Sequence[int], where: str
) -> None:
    """Check that a NaN in token 20 of the first of two requests reaches the rows that see it, and no others."""
    tokens = random_tokens(shape, lengths)
    good = outputs(tokens)
    # Keys and values of halves and int8 may be a NaN of any payload.
    bits = 0x7FC0_0000 if shape.format == "f32" or where == "query" else 0x7FFF_FFFF
    tokens[0].view(torch.int32)[20, {"query": 16 + 3, "key": 32 + 3, "value": 48 + 3}[where]] = bits
    bad = outputs(tokens)
    first = bad[0].view(torch.float32)
    if where == "query":
        assert first[20, 16:].isnan().all()
        assert torch.equal(first[20, :16], good[0].view(torch.float32)[20, :16])
    else:
        columns = first[20:] if where == "key" or shape.format == "i8" else first[20:, [3, 19]]
        assert columns.isnan().all()
    assert torch.equal(bad[0][:12], good[0][:12])
    assert torch.equal(bad[1], good[1])


def rising_tokens(shape: Shape, length: int, most: float) -> torch.Tensor:
    """Queries, keys and values whose scores rise from the first position to the last; they fall if `most` < 0."""
    (tokens,) = random_tokens(shape, [length])
    q, k, _ = (part.unflatten(1, (-1, shape.head_size)) for part in tokens.split(shape.widths, 1))
    q[..., 0] = abs(most)
    k[:, 0, 0] = torch.linspace(-most, most, length)
    return tokens


def visible(length: int, window: int) -> torch.Tensor:
    """[T, T]: whether a position sees another."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & ((distance < window) if window else True)
