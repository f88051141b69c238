"""`PlannedModel`: native ops with buffers, weights and cache at their final addresses, ready to run steps.

`NativeOps` says what the ops are, with names instead of addresses; `record.py` makes it of a program. Buffers share
memory when they are not alive at the same time. Nothing is allocated after this.
Next to read: `native/plan/plan.h`, then `runtime/forward.py`, which runs it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire._native import Activation, KvFormat, RowType
from quire.errors import EngineDeadError
from quire.events import OpTime
from quire.kernels.instruction import Buffer, Instruction, StepShape
from quire.kernels.tracing import NotTraceableError
from quire.runtime.links import RANK_LOST
from quire.runtime.plan.packed_weights import PackedWeights

if TYPE_CHECKING:
    from quire.runtime.plan.record import Recording

BODY, LOGITS, GREEDY, SHARES = 1, 2, 4, 8
"""Parts of a plan: hidden states; logits of the rows asked for; only the likeliest token of each of these rows; only
the logits of this rank's share of the vocabulary."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The largest step: tokens, requests, and rows of logits computed at once.

    `tile_rows`: `EngineConfig`'s. `kv_ahead_bytes`: `Hardware`'s. `fetches_experts`: they lie on disk.
    """

    max_tokens: int
    max_requests: int
    max_logit_rows: int
    tile_rows: int = 0
    kv_ahead_bytes: int | None = None
    fetches_experts: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Per buffer the number of its place, and per place the bytes of a row."""

    places: dict[Buffer, int]
    row_bytes: list[int]


def place_buffers(body: Sequence[Instruction], result: Buffer, given: Collection[Buffer] = ()) -> Placement:
    """Give each buffer but those `given` a place from its first to its last use; `result` keeps its own to the end.

    An instruction's inputs and outputs never share one: its threads read and write at the same time.
    """
    last_use = {buffer: index for index, instruction in enumerate(body) for buffer in instruction.buffers}
    last_use[result] = len(body)
    placement = Placement({}, [])
    free: set[int] = set()
    for index, instruction in enumerate(body):
        buffers = [buffer for buffer in dict.fromkeys(instruction.buffers) if buffer not in given]
        for buffer in buffers:
            if buffer not in placement.places:
                placement.places[buffer] = _take_place(placement.row_bytes, free, buffer.row_bytes)
        free.update(placement.places[buffer] for buffer in buffers if last_use[buffer] == index)
    return placement


def _take_place(row_bytes: list[int], free: set[int], needed: int) -> int:
    """The smallest free place that is large enough, else a new one."""
    fitting = [place for place in free if row_bytes[place] >= needed]
    if not fitting:
        row_bytes.append(needed)
        return len(row_bytes) - 1
    best = min(fitting, key=lambda place: (row_bytes[place], place))
    free.remove(best)
    return best


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Memory of `row_bytes` per row, for as many rows as `PlanLimits` has in the field `rows`; of each thread's own."""

    row_bytes: int
    rows: str
    per_thread: bool = False


class _Symbol(msgspec.Struct, frozen=True, array_like=True):
    """Stands for a field of an op that is known when the plan gets its memory."""


class RowsAt(_Symbol, frozen=True, array_like=True, tag="rows"):
    """The `Rows` at byte `offset` of a place, `stride` bytes apart."""

    place: int
    offset: int
    stride: int
    row_type: str


class AddressOf(_Symbol, frozen=True, array_like=True, tag="address"):
    """The address of byte `offset` of a place."""

    place: int
    offset: int


class WeightOf(_Symbol, frozen=True, array_like=True, tag="weight"):
    """The `Weight` of a matrix."""

    name: str


class VectorOf(_Symbol, frozen=True, array_like=True, tag="vector"):
    """The address of a vector's fp32 values."""

    name: str


class ConstantOf(_Symbol, frozen=True, array_like=True, tag="constant"):
    """The address of one of the constants."""

    index: int


class CountersOf(_Symbol, frozen=True, array_like=True, tag="counters"):
    """The address of some of the counters."""

    index: int


class KvLayerOf(_Symbol, frozen=True, array_like=True, tag="kv"):
    """A layer's share of the KV pool."""

    layer_index: int


class AheadOf(_Symbol, frozen=True, array_like=True, tag="ahead"):
    """The keys and values of a layer that a product fetches for the attention behind it."""

    layer_index: int
    window: int
    begin: float
    end: float


class ActivationOf(_Symbol, frozen=True, array_like=True, tag="activation"):
    """An activation."""

    name: str


class OfEngine(_Symbol, frozen=True, array_like=True, tag="engine"):
    """A thing of which the engine has one: "best_ids", "max_logit_rows" or "exchange"."""

    name: str


Symbols = (
    RowsAt | AddressOf | WeightOf | VectorOf | ConstantOf | CountersOf | KvLayerOf | AheadOf | ActivationOf | OfEngine
)
Value = Symbols | bool | int | float | None


class NativeOp(msgspec.Struct, frozen=True, array_like=True):
    """A call of a method of `_native.Plan`: the parts of the plan it belongs to, and its fields."""

    name: str
    parts: int
    values: dict[str, Value]


class NativeOps(msgspec.Struct, frozen=True):
    """A traced and lowered model, without addresses.

    Fields:
        ops: in order, those of the body first.
        num_body_ops: those up to the hidden states.
        places: all working memory.
        hidden, logits: the rows of both results, and their columns.
        constants: fp32 values, such as rotary frequencies.
        counters: how many each counting instruction keeps.
        gives_likeliest: True if `GREEDY` is a part.
        inputs, outputs: of a stage the values that it receives and sends, and their columns.
        layers: of a stage its first layer, and the first of the next; None: all.
        shares: the rows of a rank's share of the logits, and their columns; None: `SHARES` is no part.
    """

    ops: list[NativeOp]
    num_body_ops: int
    places: list[Place]
    hidden: tuple[RowsAt, int]
    logits: tuple[RowsAt, int]
    constants: list[list[float]]
    counters: list[int]
    gives_likeliest: bool
    inputs: list[tuple[RowsAt, int]] = []
    outputs: list[tuple[RowsAt, int]] = []
    layers: tuple[int, int] | None = None
    shares: tuple[RowsAt, int] | None = None


class PlannedModel:
    """A model's plan and the memory it works in.

    Attributes:
        hidden: fp32 [max_tokens, E]; rows of the last step's tokens.
        logits: fp32 [max_logit_rows, V].
        shares: fp32 [max_logit_rows, columns of a rank]; None if `SHARES` is no part.
        best_ids: int32 [max_logit_rows]; -1 where logits leave no choice.
        inputs, outputs: of a stage, fp32 [max_tokens, width] each: written before it runs, and read then.
    """

    def __init__(
        self,
        recording: "Recording",
        weights: PackedWeights,
        kv_layers: Sequence[_native.KvLayer],
        limits: PlanLimits,
        pool: _native.ThreadPool | int,
        exchange: _native.Exchange | None = None,
    ) -> None:
        """`pool`: the threads that run it, or how many of its own. `exchange`: with the ranks that share the model."""
        self.recording, ops = recording, recording.ops
        self.limits = limits
        self.gives_likeliest = ops.gives_likeliest
        self.native = _native.Plan(pool, limits.max_tokens, max(limits.max_requests, limits.max_logit_rows))
        self.native.set_tile_rows(limits.tile_rows)
        if limits.kv_ahead_bytes is not None:
            self.native.set_ahead_bytes(limits.kv_ahead_bytes)
        if limits.fetches_experts:
            self.native.fetch_experts()
        self._weights, self._kv_layers, self._exchange = weights, kv_layers, exchange
        self._num_body_ops = ops.num_body_ops
        self._memory = [
            _allocate(
                place.row_bytes * getattr(limits, place.rows) * (self.native.num_threads if place.per_thread else 1)
            )
            for place in ops.places
        ]
        self._constants = [np.array(values, np.float32) for values in ops.constants]
        self._counters: list[NDArray[np.int32]] = [np.zeros(count, np.int32) for count in ops.counters]
        self.best_ids: NDArray[np.int32] = np.zeros(limits.max_logit_rows, np.int32)
        self.hidden, self.logits = (
            self._values(*ops.hidden, limits.max_tokens),
            self._values(*ops.logits, limits.max_logit_rows),
        )
        self.shares = None if ops.shares is None else self._values(*ops.shares, limits.max_logit_rows)
        self.inputs, self.outputs = (
            [self._values(*value, limits.max_tokens) for value in values] for values in (ops.inputs, ops.outputs)
        )
        for op in ops.ops:
            fields = {name: self._resolve(value) for name, value in op.values.items()}
            getattr(self.native, op.name)(**fields, parts=op.parts)

    def run(
        self,
        parts: int,
        rows: NDArray[np.int32],
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        tokens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        *,
        nanoseconds: NDArray[np.int64] | None = None,
    ) -> None:
        """Compute parts of one step; the GIL is released meanwhile. Raises: EngineDeadError if another rank is lost.

        Shapes: rows, starts, counts [R]: each request's row in the tables, its first new position and its number of
            new tokens; logit_rows [S] tokens of the step; tokens [rows, …]; block_tables [groups, rows, …];
            nanoseconds: per native op the time it took, written where it ran.
        """
        group_stride, table_stride = block_tables.strides[0] // 4, block_tables.strides[1] // 4
        self.native.run(
            parts, len(rows), len(logit_rows), rows.ctypes.data, starts.ctypes.data, counts.ctypes.data,
            logit_rows.ctypes.data, tokens.ctypes.data, tokens.strides[0] // 4, block_tables.ctypes.data,
            table_stride, group_stride, 0 if nanoseconds is None else nanoseconds.ctypes.data,
        )  # fmt: skip
        if self._exchange is not None and self._exchange.has_given_up:
            raise EngineDeadError(RANK_LOST)

    @property
    def ops(self) -> list[Instruction]:
        """The instruction of each native op, in order."""
        return self.recording.instructions

    def run_timed(self, parts: int, *arrays: NDArray[np.int32]) -> list[OpTime]:
        """`run`, which also gives the time and work of each native op that ran, in order."""
        instructions, counters = self.ops, self.recording.counters
        nanoseconds = np.zeros(len(instructions), np.int64)
        self.run(parts, *arrays, nanoseconds=nanoseconds)
        _, starts, counts, logit_rows, *_ = arrays
        requests = tuple(zip(starts.tolist(), counts.tolist(), strict=True))
        kv_format = self._kv_layers[0].format if self._kv_layers else KvFormat.f32
        whole = StepShape(requests, len(logit_rows), kv_format, self.limits.tile_rows)
        times = []
        for index in np.flatnonzero(nanoseconds).tolist():
            instruction = instructions[index]
            step = whole if index < self._num_body_ops else whole.of_logit_rows()
            cost = instruction.measured(step, self.counters_of)
            name, num_bytes = instruction.describe(step.num_tokens), cost.bytes_read + cost.bytes_written
            loads = tuple(self.counters_of(instruction).tolist()) if instruction in counters else ()
            microseconds = int(nanoseconds[index]) / 1e3
            times.append(OpTime(name, microseconds, cost.flops, num_bytes, cost.arithmetic, loads))
        return times

    def counters_of(self, instruction: Instruction) -> NDArray[np.int32]:
        """Return the counters of an instruction, as the last step left them."""
        return self._counters[self.recording.counters[instruction]]

    def _values(self, rows: RowsAt, width: int, num_rows: int) -> NDArray[np.float32]:
        """The fp32 values of a place. Shapes: [num_rows, width]."""
        memory = self._memory[rows.place][: num_rows * rows.stride]
        return memory.view(np.float32).reshape(num_rows, rows.stride // 4)[:, :width]

    def _resolve(self, value: Value) -> Any:
        """Give a field of an op its native value."""
        match value:
            case RowsAt(place, offset, stride, row_type):
                return _native.Rows(self._memory[place].ctypes.data + offset, stride, RowType[row_type])
            case AddressOf(place, offset):
                return self._memory[place].ctypes.data + offset
            case WeightOf(name):
                return self._weights.weight(name)
            case VectorOf(name):
                return self._weights.vector_address(name)
            case ConstantOf(index):
                return self._constants[index].ctypes.data
            case CountersOf(index):
                return self._counters[index].ctypes.data
            case KvLayerOf(layer_index):
                return self._kv_layers[layer_index]
            case AheadOf(layer_index, window, begin, end):
                return _native.KvAhead(self._kv_layers[layer_index], window, begin, end)
            case ActivationOf(name):
                return Activation[name]
            case OfEngine("exchange"):
                if self._exchange is None:
                    raise NotTraceableError("a collective of several ranks")
                return self._exchange.address
            case OfEngine("best_ids"):
                return self.best_ids.ctypes.data
            case OfEngine(name):
                return getattr(self.limits, name)
        return value


def _allocate(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory that starts at a multiple of 64."""
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]
