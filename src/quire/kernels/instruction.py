"""Buffers, instructions on them, and their costs: a plan before it has addresses.

An operation's instruction is declared beside the operation (`rms_norm/__init__.py`). Its fields are buffers, parameters
(`torch.nn.Parameter`, by identity) and numbers; `emit` gives them addresses and calls the native op. Must not know
models. Next to read: `lowering.py`, which makes instructions, then `runtime/plan/emit.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from quire._native import (
    KvAhead,
    KvFormat,
    KvLayer,
    Rows,
    RowType,
    Weight,
    WeightFormat,
    has_tiles,
    packed_bytes,
    wanted_rows,
)
from quire.nn import is_parameter

ROW_ALIGNMENT = 64
NARROW_KV = (KvFormat.i8, KvFormat.e4m3, KvFormat.e5m2)
KV_BYTES = {KvFormat.f32: 4, KvFormat.f16: 2, KvFormat.bf16: 2, **dict.fromkeys(NARROW_KV, 1)}
KV_ARITHMETIC = {**dict.fromkeys(KvFormat, "fp32"), KvFormat.bf16: "bf16", KvFormat.i8: "int8"}
ROW_ARITHMETIC = {RowType.f32: "fp32", RowType.bf16: "bf16", RowType.q8: "int8"}


@dataclass(eq=False, slots=True)
class Buffer:
    """[T, width] values that live from the instruction that writes them to the last that reads them."""

    width: int
    type: RowType = RowType.f32

    @property
    def row_bytes(self) -> int:
        """Bytes per row; rows start at multiples of 64."""
        used = 4 * self.width if self.type == RowType.f32 else 2 * (self.width + self.width % 2)
        if self.type == RowType.q8 and not has_tiles():
            used = self.width // 32 * 48
        aligned = -(-used // ROW_ALIGNMENT) * ROW_ALIGNMENT
        # In AMX's tiles q8 rows of long steps are bf16 (native/plan/plan.h). A tile's 16 rows lie in as many sets of L1
        # if they are an odd number of lines apart.
        return aligned | ROW_ALIGNMENT if has_tiles() and self.type != RowType.f32 else aligned


@dataclass(frozen=True, slots=True)
class Columns:
    """`width` columns of a buffer from `start` on: an fp32 buffer's, or all of any buffer."""

    buffer: Buffer
    start: int
    width: int


@dataclass(frozen=True, slots=True)
class Packing:
    """The parts of a packed matrix [N, I], one below another, each with its number of outputs and its format.

    All parts want the same rows (`native/plan/types.h`).
    """

    parts: tuple[tuple[int, WeightFormat], ...]

    @classmethod
    def whole(cls, num_outputs: int, weight_format: WeightFormat) -> "Packing":
        """Return the packing of a matrix in one format."""
        return cls(((num_outputs, weight_format),))

    @property
    def name(self) -> str:
        """The formats from top to bottom, as "q4k+q6k"."""
        return "+".join(weight_format.name for _, weight_format in self.parts)

    @property
    def rows(self) -> RowType:
        """The type of rows that a product with it reads."""
        return wanted_rows(self.parts[0][1])

    def num_bytes(self, num_inputs: int) -> int:
        """Bytes of the matrix, each part from a whole tile on."""
        return sum(packed_bytes(weight_format, count, num_inputs) for count, weight_format in self.parts)


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one instruction in one step.

    Fields:
        flops: multiplications and additions, in `arithmetic`: "int8", "bf16" or "fp32".
        bytes_read, bytes_written: weights and the KV cache. Values that pass from one instruction to the next stay in
            the processor's caches and do not count.
        bytes_sent: to other ranks.
    """

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    arithmetic: str = "fp32"
    bytes_sent: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes moved between memory and processor."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of one step.

    Fields:
        requests: per request its first new position and its number of new tokens.
        num_logit_rows: S.
        kv_format: of the KV cache.
        tile_rows: products with 4- and 8-bit weights are in bf16 from this number of tokens on; 0: never.
    """

    requests: tuple[tuple[int, int], ...]
    num_logit_rows: int = 0
    kv_format: KvFormat = KvFormat.f32
    tile_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(count for _, count in self.requests)

    def num_scores(self, window: int) -> int:
        """Positions attended to, added up over the new tokens. `window` 0: all earlier positions."""
        ends = (range(start + 1, start + count + 1) for start, count in self.requests)
        return sum(min(end, window or end) for tokens in ends for end in tokens)

    def num_positions(self, window: int) -> int:
        """Positions whose keys and values are read, added up over the requests."""
        return sum(start + count - max(0, start - window + 1) * (window > 0) for start, count in self.requests)

    def of_logit_rows(self) -> "StepShape":
        """The step as the head sees it: its tokens are the rows that need logits."""
        return replace(self, requests=((0, self.num_logit_rows),))


Counters = Callable[["Instruction"], Any]
"""An instruction's counters as a NumPy array."""


class Emitter(Protocol):
    """Adds native ops to a plan, and knows the addresses of buffers, parameters and KV layers."""

    def push(self, op: str, **values: Any) -> None:
        """Add a native op with these fields (`native/ops/`)."""

    def rows(self, value: Buffer | Columns, stride_bytes: int | None = None) -> Rows:
        """The `Rows` of a value. `stride_bytes`: from row to row, None for those of the buffer."""

    def address(self, value: Buffer | Columns) -> int:
        """Address of the first row."""

    def weight(self, parameter: Any) -> Weight:
        """The `Weight` of a matrix."""

    def vector(self, parameter: Any) -> int:
        """Address of a vector's fp32 values; 0 for None."""

    def constant(self, values: Any) -> int:
        """Address of a copy of a tensor in fp32."""

    def counters(self, instruction: "Instruction", count: int) -> int:
        """Address of int32 counters that an instruction keeps from step to step, zero at first."""

    def kv_layer(self, layer_index: int) -> KvLayer:
        """The `KvLayer` of one layer."""

    def exchange(self) -> int:
        """Address of the `Exchange` with other ranks."""

    def ahead(self, instruction: "Instruction") -> KvAhead | None:
        """The `KvAhead` that a product may fetch; None if there is none."""


class Instruction:
    """Base of all instructions: frozen dataclasses, compared by identity."""

    __slots__ = ()

    def emit(self, to: Emitter) -> None:
        """Add the native op."""
        raise NotImplementedError

    def cost(self, step: StepShape) -> Cost:
        """FLOPs and bytes in one step."""
        raise NotImplementedError

    def measured(self, step: StepShape, counters: Counters) -> Cost:
        """FLOPs and bytes of the step that ran last, where they depend on its values: by default `cost`."""
        return self.cost(step)

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that it reads or writes."""
        return [value.buffer if isinstance(value, Columns) else value for _, value in self._values()]

    @property
    def parameters(self) -> list[Any]:
        """The weights that it reads, each as the model's parameter."""
        return [value for _, value in self._fields() if is_parameter(value)]

    def describe(self, num_rows: int) -> str:
        """Name, shapes and types for one step, as traces show them."""
        shown = []
        for name, value in self._values():
            buffer = value.buffer if isinstance(value, Columns) else value
            shown.append(f"{name} [{num_rows}, {value.width}] {buffer.type.name}")
        weight, packing = getattr(self, "weight", None), getattr(self, "packing", None)
        if weight is not None:
            shown.append(f"weight {list(weight.shape)}{f' {packing.name}' if packing else ''}")
        return f"{type(self).__name__}: {', '.join(shown)}"

    def _values(self) -> Iterator[tuple[str, Buffer | Columns]]:
        return ((name, value) for name, value in self._fields() if isinstance(value, Buffer | Columns))

    def _fields(self) -> Iterator[tuple[str, Any]]:
        """Yield each field's name and value, of a tuple each item."""
        for field in fields(self):  # type: ignore[arg-type]  # all subclasses are dataclasses
            value = getattr(self, field.name)
            yield from ((field.name, item) for item in (value if isinstance(value, tuple) else (value,)))


@dataclass(eq=False, frozen=True, slots=True)
class Convert(Instruction):
    """The same values in another type; with `takes_logit_rows` only those of the rows that need logits."""

    x: Columns
    out: Buffer
    takes_logit_rows: bool = False

    def emit(self, to: Emitter) -> None:
        options = {"from_logit_rows": True} if self.takes_logit_rows else {}
        to.push("activate", x=to.rows(self.x), out=to.rows(self.out), width=self.out.width, **options)

    def cost(self, step: StepShape) -> Cost:
        return Cost()


def product_cost(step: StepShape, shape: tuple[int, ...], packing: Packing, bias: Any) -> Cost:
    """The cost of a linear layer [N, I]: 2 · T · N · I operations, its weight and bias read once."""
    num_outputs, num_inputs = shape
    num_bytes = packing.num_bytes(num_inputs) + (0 if bias is None else 4 * num_outputs)
    rows = packing.rows
    if rows == RowType.q8 and 0 < step.tile_rows <= step.num_tokens:
        rows = RowType.bf16
    return Cost(2 * step.num_tokens * num_outputs * num_inputs, num_bytes, 0, ROW_ARITHMETIC[rows])
