"""Instructions, the buffers they read and write, and their costs: a plan before it has addresses.

Each operation's module declares its instruction (`rms_norm.py`). An instruction names its weights by the model's own
parameter objects, which have shapes and no values; the packed values belong to `runtime/plan/packed_weights.py`. `emit`
looks up the addresses of buffers and weights and adds the native op. Must not know models.
Next to read: `lowering.py`, which makes instructions, then `runtime/plan/emit.py`.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from quire._native import (
    KvAhead,
    KvFormat,
    KvLayer,
    Rows,
    RowType,
    WeightFormat,
    has_tiles,
    packed_bytes,
    wanted_rows,
)
from quire.nn import parameter_types

ROW_ALIGNMENT = 64
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
    """The formats of a packed weight [N, I]: from its first row to its last, the number of rows in each format.

    A weight has several formats if its layer stacks stored tensors that differ, as Q4_K queries on Q6_K values. A
    product reads its input once, so all parts multiply rows of one type (`native/plan/types.h`).
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
        """The type in which a product with this weight reads its input."""
        return wanted_rows(self.parts[0][1])

    def num_bytes(self, num_inputs: int) -> int:
        """Bytes of the packed weight; each part fills whole tiles."""
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

    num_tokens: int = field(init=False)
    """T, which every cost asks for."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(count for _, count in self.requests))

    @property
    def kv_value_bytes(self) -> int:
        """Bytes of a value in the KV cache."""
        return {KvFormat.f32: 4, KvFormat.f16: 2, KvFormat.bf16: 2}.get(self.kv_format, 1)

    @property
    def kv_arithmetic(self) -> str:
        """The arithmetic of attention: see `Cost`."""
        return {KvFormat.bf16: "bf16", KvFormat.i8: "int8"}.get(self.kv_format, "fp32")

    def num_scores(self, window: int) -> int:
        """Positions attended to, added up over the new tokens. `window` 0: all earlier positions."""
        total = 0
        for start, count in self.requests:
            num_whole = min(count, max(0, window - start)) if window else count
            total += num_whole * (2 * start + num_whole + 1) // 2 + (count - num_whole) * window
        return total

    def num_positions(self, window: int) -> int:
        """Positions whose keys and values are read, added up over the requests."""
        return sum(start + count - max(0, start - window + 1) * (window > 0) for start, count in self.requests)

    def of_logit_rows(self) -> "StepShape":
        """The step as the head sees it: its tokens are the rows that need logits."""
        return replace(self, requests=((0, self.num_logit_rows),))


@dataclass(frozen=True, slots=True)
class Product:
    """The weight [N, I] of a product; of its `num_experts` equal parts each row multiplies with `num_active`."""

    weight: Any
    packing: Packing
    num_experts: int = 1
    num_active: int = 1

    def num_read(self, num_tokens: int) -> float:
        """Parts that T tokens choose if each draws k of X evenly: X · (1 - (1 - k / X)^T). One token chooses k."""
        return self.num_experts * (1 - (1 - self.num_active / self.num_experts) ** num_tokens)

    def cost(self, step: StepShape, bias: Any, num_read: float = 1) -> Cost:
        """2 · T · N · I · k / X operations; `num_read` parts of the weight and the bias are read, each once."""
        num_outputs, num_inputs = self.weight.shape
        num_bytes = self.packing.num_bytes(num_inputs) + (0 if bias is None else 4 * num_outputs)
        rows = self.packing.rows
        if rows == RowType.q8 and 0 < step.tile_rows <= step.num_tokens:
            rows = RowType.bf16
        flops = 2 * step.num_tokens * num_outputs * num_inputs * self.num_active // self.num_experts
        return Cost(flops, round(num_read * num_bytes / self.num_experts), 0, ROW_ARITHMETIC[rows])


@dataclass(frozen=True, slots=True)
class Collective:
    """A sum over all ranks, or else a concatenation, that every rank gets.

    Fields:
        share: the values of this rank.
        width, value_bytes: of a row of the result.
        is_ring: values go round a ring of ranks; otherwise the ranks share memory.
    """

    is_sum: bool
    share: Columns
    width: int
    value_bytes: int
    num_ranks: int
    is_ring: bool

    def num_bytes(self, step: StepShape) -> int:
        """Bytes of the result: T · width · bytes."""
        return step.num_tokens * self.width * self.value_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """A row of `quire explain`: an instruction's work in one step, or a part of it.

    Fields:
        name: "{role}" stands for its weight's role in the layer, "{before}" for the name of the product before it.
        formula: of the FLOPs or bytes, with this step's numbers.
        shape: m×k×n of a product.
        uncausal_flops: FLOPs with the scores that the mask drops.
    """

    name: str
    cost: Cost
    formula: str
    shape: str = ""
    uncausal_flops: int = 0


Counters = Callable[["Instruction"], Any]
"""An instruction's counters as a NumPy array."""


class Emitter(Protocol):
    """Adds native ops to a plan, and knows the addresses of buffers, parameters and KV layers."""

    def push(self, op: str, **values: Any) -> None:
        """Add a native op with these fields (`native/ops/`).

        `parts`: of the plan, instead of those that are being emitted.
        Values are passed as `Rows`, parameters as a `Weight` or, if they are vectors, the address of fp32 values. None
        leaves a field at its default.
        """

    def rows(self, value: Buffer | Columns, stride_bytes: int | None = None) -> Rows:
        """The `Rows` of a value. `stride_bytes`: from row to row, None for those of the buffer."""

    def address(self, value: Buffer | Columns) -> int:
        """Address of the first row."""

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

    def adapter_site(self, weight: Any) -> int | None:
        """Address of the `LoraSite` of a linear layer; None if the engine has no adapters."""


class Instruction:
    """Base of all instructions: frozen dataclasses, compared by identity.

    What others must know of an instruction is a trait: one of the attributes and methods from `is_attention` on, each
    with the value of an ordinary instruction. Nothing asks for an instruction's class.
    Fields that mean the same everywhere: `weight` a parameter, `packing` its format, `layer_index` a layer's cache.
    Traits: `is_attention`: it multiplies queries with keys and values of the cache. `is_lookup`: it reads rows of a
        table by id. `is_repeated`: it reads nothing but positions, so that each pipeline stage has its own.
        `fetches_ahead`: it calls `Emitter.ahead`.
    """

    __slots__ = ()
    is_attention = is_lookup = is_repeated = fetches_ahead = False

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
    def product(self) -> Product | None:
        """The product that it computes; None if it computes none."""
        return None

    @property
    def collective(self) -> Collective | None:
        """The value that all ranks get by it; None if it is no sum or concatenation over ranks."""
        return None

    @property
    def ahead(self) -> tuple[int, int] | None:
        """The layer and the window of the keys that products before it may fetch; None if it has no use for them."""
        return None

    @property
    def adapter_input(self) -> Columns | None:
        """The input of a linear layer, which adapters read too; None if the instruction takes no adapters."""
        return None

    @property
    def cache_layer(self) -> int | None:
        """The layer whose cache it reads or writes."""
        return getattr(self, "layer_index", None)

    @property
    def named_weight(self) -> Any:
        """The parameter whose role in the layer names it."""
        return getattr(self, "weight", None)

    def cache_bytes_read(self, step: StepShape) -> int:
        """Bytes of the cache among the bytes that it reads."""
        return 0

    def likeliest(self, before: "Likeliest | None") -> "Likeliest | None":
        """The instruction that finds the largest of its results without writing them; None if there is none.

        `before`: the same for the instruction whose results it reads.
        """
        return None

    def explain(self, step: StepShape) -> list[Work]:
        """The rows that `quire explain` shows for it."""
        cost, name, num_rows = self.cost(step), type(self).__name__, step.num_tokens
        if self.product is None:
            return [Work(name if self.named_weight is None else f"{name} {{role}}", cost, f"{num_rows} rows")]
        one, (num_outputs, num_inputs) = self.product, self.product.weight.shape
        num_rows, num_outputs = num_rows * one.num_active, num_outputs // one.num_experts
        formula = f"2 · {num_rows} · {num_inputs} · {num_outputs} FLOP; weight {cost.bytes_read} B read once"
        if one.num_experts > 1:
            formula += f", {one.num_read(step.num_tokens):.3g} of {one.num_experts} experts"
        return [Work("{role}", cost, formula, f"{num_rows}×{num_inputs}×{num_outputs}")]

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that it reads or writes."""
        return [value.buffer if isinstance(value, Columns) else value for _, value in self._values()]

    @property
    def parameters(self) -> list[Any]:
        """The model's parameters that it reads."""
        types = parameter_types()
        return [value for _, value in self._fields() if isinstance(value, types)]

    @property
    def cost_key(self) -> tuple[Hashable, ...]:
        """Instructions with equal keys, such as those of like layers, have equal costs in each step."""
        types = parameter_types()
        values = ((name, _size_of(value, types)) for name, value in self._fields() if name != "layer_index")
        return (type(self), *values)

    def describe(self, num_rows: int | str) -> str:
        """Name, shapes and types for one step, as traces show them."""
        shown = []
        for name, value in self._values():
            buffer = value.buffer if isinstance(value, Columns) else value
            shown.append(f"{name} [{num_rows}, {value.width}] {buffer.type.name}")
        weight, packing = self.named_weight, getattr(self, "packing", None)
        if weight is not None:
            shown.append(f"weight {list(weight.shape)}{f' {packing.name}' if packing else ''}")
        return f"{type(self).__name__}: {', '.join(shown)}"

    def _values(self) -> list[tuple[str, Buffer | Columns]]:
        return [(name, value) for name, value in self._fields() if isinstance(value, _VALUES)]

    def _fields(self) -> list[tuple[str, Any]]:
        """Return each field's name and value, of a tuple each item."""
        found: list[tuple[str, Any]] = []
        for name in _names_of_fields(type(self)):  # type: ignore[arg-type]  # a class can be hashed
            value = getattr(self, name)
            found += [(name, item) for item in value] if isinstance(value, tuple) else [(name, value)]
        return found


_VALUES = (Buffer, Columns)


def _size_of(value: Any, parameters: tuple[type[Any], ...]) -> Hashable:
    """Return what a cost may depend on: of a buffer or a parameter its size, else the value, which may be itself."""
    if isinstance(value, _VALUES):
        return value.width
    if isinstance(value, parameters):
        return tuple(value.shape)
    return value if isinstance(value, Hashable) else id(value)


@functools.cache
def _names_of_fields(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


@dataclass(eq=False, frozen=True, slots=True)
class Convert(Instruction):
    """The same values in another type; with `takes_logit_rows` only those of the rows that need logits."""

    x: Columns
    out: Buffer
    takes_logit_rows: bool = False

    def emit(self, to: Emitter) -> None:
        to.push("activate", x=self.x, out=self.out, width=self.out.width, from_logit_rows=self.takes_logit_rows)

    def cost(self, step: StepShape) -> Cost:
        return Cost()


@dataclass(eq=False, frozen=True, slots=True)
class Likeliest(Instruction):
    """The column of the largest logit of each row: a head's product, whose results are compared and not written.

    `soft_cap` 0: logits are compared as they are. Next to read: `native/ops/head.h`.
    """

    weight: Any
    bias: Any
    packing: Packing
    x: Columns
    soft_cap: float = 0.0

    def emit(self, to: Emitter) -> None:
        """See `Instruction`. Needs the memory that `PlannedModel` gives it."""
        to.push("head", weight=self.weight, bias=self.bias, x=self.x, soft_cap=self.soft_cap)

    def cost(self, step: StepShape) -> Cost:
        return self.product.cost(step, self.bias)

    @property
    def product(self) -> Product:
        return Product(self.weight, self.packing)
