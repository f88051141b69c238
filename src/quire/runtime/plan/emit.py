"""`PlannedModel`: native ops with buffers, weights and cache at their final addresses, ready to run steps.

Each instruction of a program adds its native op to a `_native.Plan`. Buffers share memory when they are not alive at
the same time. Nothing is allocated after this.
Next to read: `native/plan/plan.h`, then `runtime/forward.py`, which runs it.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire._native import KvFormat
from quire.errors import EngineDeadError
from quire.events import OpTime
from quire.kernels.instruction import Buffer, Columns, Cost, Instruction, StepShape
from quire.kernels.linear import Argmax
from quire.kernels.lora import with_adapters
from quire.kernels.tracing import NotTraceableError
from quire.nn import parameter_types
from quire.runtime.links import RANK_LOST
from quire.runtime.plan.lower import Program, layers_of
from quire.runtime.plan.packed_weights import PackedWeights

BODY, LOGITS, GREEDY, SHARES = 1, 2, 4, 8
"""Parts of a plan: hidden states; logits of the rows asked for; only the likeliest token of each of these rows; only
the logits of this rank's share of the vocabulary."""


ROWS = "{rows}"
"""Stands for the number of rows in the description of an instruction."""


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
class BufferPlaces:
    """Per buffer the number of its place, and per place the bytes of a row."""

    places: dict[Buffer, int]
    row_bytes: list[int]


def place_buffers(body: Sequence[Instruction], result: Buffer, given: Collection[Buffer] = ()) -> BufferPlaces:
    """Give each buffer but those `given` a place from its first to its last use; `result` keeps its own to the end.

    An instruction's inputs and outputs never share one: its threads read and write at the same time.
    """
    used = [dict.fromkeys(instruction.buffers) for instruction in body]
    last_use = {buffer: index for index, buffers in enumerate(used) for buffer in buffers}
    last_use[result] = len(body)
    found = BufferPlaces({}, [])
    free: set[int] = set()
    for index, all_buffers in enumerate(used):
        buffers = [buffer for buffer in all_buffers if buffer not in given]
        for buffer in buffers:
            if buffer not in found.places:
                found.places[buffer] = _take_place(found.row_bytes, free, buffer.row_bytes)
        free.update(found.places[buffer] for buffer in buffers if last_use[buffer] == index)
    return found


def _take_place(row_bytes: list[int], free: set[int], needed: int) -> int:
    """The smallest free place that is large enough, else a new one."""
    fitting = [place for place in free if row_bytes[place] >= needed]
    if not fitting:
        row_bytes.append(needed)
        return len(row_bytes) - 1
    best = min(fitting, key=lambda place: (row_bytes[place], place))
    free.remove(best)
    return best


def plan_ahead(body: Sequence[Instruction]) -> dict[Instruction, tuple[int, int, float, float]]:
    """Per product before an attention the keys and values that it fetches for it, in proportion to its weights.

    Returns: the attention's layer and window, and the share of its keys and values where the product begins and ends.
    """
    parts: dict[Instruction, tuple[int, int, float, float]] = {}
    waiting: list[tuple[Instruction, int]] = []
    for instruction in body:
        if instruction.fetches_ahead and instruction.product is not None:
            waiting.append((instruction, instruction.product.weight.numel()))
        elif instruction.ahead is not None:
            total, before = sum(size for _, size in waiting), 0
            for product, size in waiting:
                parts[product] = *instruction.ahead, before / total, (before + size) / total
                before += size
            waiting = []
    return parts


class PlannedModel:
    """A program's native plan and the memory it works in.

    Attributes:
        ops: the instruction of each native op, in order; layers: of those that belong to a layer its index.
        hidden: fp32 [max_tokens, E]; rows of the last step's tokens.
        logits: fp32 [max_logit_rows, V].
        shares: fp32 [max_logit_rows, columns of a rank]; None if `SHARES` is no part.
        best_ids: int32 [max_logit_rows]; -1 where logits leave no choice.
        gives_likeliest: `GREEDY` is a part.
        kv_layers, exchange: as given.
        inputs, outputs: of a stage, fp32 [max_tokens, width] each: written before it runs, and read then.
    """

    def __init__(
        self,
        program: Program,
        weights: PackedWeights,
        kv_layers: Sequence[_native.KvLayer],
        limits: PlanLimits,
        pool: _native.ThreadPool | int,
        exchange: _native.Exchange | None = None,
        adapter_sites: Callable[[str], int] | None = None,
    ) -> None:
        """`pool`: the threads that run it, or how many of its own. `exchange`: with the ranks that share the model.
        `adapter_sites`: of an engine with adapters, the address of a linear layer's, by its weight's name.

        Raises: NotTraceableError for a collective without `exchange`.
        """
        self.program, self.weights, self.limits = program, weights, limits
        self.native = _native.Plan(pool, limits.max_tokens, max(limits.max_requests, limits.max_logit_rows))
        self.native.set_tile_rows(limits.tile_rows)
        if limits.kv_ahead_bytes is not None:
            self.native.set_ahead_bytes(limits.kv_ahead_bytes)
        if limits.fetches_experts:
            self.native.fetch_experts()
        self.kv_layers, self.exchange = kv_layers, exchange
        to = self._emitter = _Emitter(self, adapter_sites)
        body = program.body if adapter_sites is None else with_adapters(program.body)
        self.ops = to.instructions
        to.allocate(place_buffers(body, program.hidden), limits.max_tokens)
        to.emit(body, BODY)
        self._num_body_ops = len(self.ops)
        self.layers = dict(zip(program.body, layers_of(program.body, weights.name_of), strict=True))
        self.hidden = to.values(program.hidden)
        self.inputs, self.outputs = (
            [to.values(buffer) for buffer in passed] for passed in (program.inputs, program.outputs)
        )
        to.allocate(BufferPlaces({program.logits: 0}, [4 * program.logits.width]), limits.max_logit_rows)
        self.logits = to.values(program.logits)
        self.best_ids: NDArray[np.int32] = np.zeros(limits.max_logit_rows, np.int32)
        self.gives_likeliest = False
        if program.head:
            given = (program.hidden, program.logits)
            to.allocate(place_buffers(program.head, program.logits, given), limits.max_logit_rows)
            self._emit_head(to)
        # Made once: a step must not wait for a reader.
        self._names = [instruction.describe(ROWS) for instruction in self.ops]
        likes: dict[Hashable, int] = {}
        self._first_alike = [likes.setdefault(one.cost_key, index) for index, one in enumerate(self.ops)]
        self.shares = None if program.shares is None else to.values(program.shares.buffer)

    def _emit_head(self, to: "_Emitter") -> None:
        """Emit rows of the hidden states in the head's type, then both the logits and the likeliest tokens."""
        program, max_rows = self.program, self.limits.max_logit_rows
        likeliest, num_shared = program.likeliest, program.num_before_logits
        logits = LOGITS if program.shares is None else LOGITS | SHARES
        to.emit(program.head[:num_shared], logits if likeliest is None else logits | GREEDY, of_logit_rows=True)
        to.emit(program.head[num_shared:-1], logits, of_logit_rows=True)
        to.emit(program.head[-1:], LOGITS, of_logit_rows=True)
        if likeliest is None:
            return
        self.gives_likeliest = True
        values, ids = (to.add_memory(4 * max_rows * self.native.num_threads).ctypes.data for _ in range(2))
        best = {"best_values": values, "best_ids": ids, "max_rows": max_rows}
        num_padding, of_ranks = 0, {}
        if self.exchange is not None:
            num_rows = likeliest.weight.shape[0]
            first_id = self.exchange.rank * num_rows
            num_padding = num_rows - min(max(program.logits.width - first_id, 0), num_rows)
            of_ranks = {"exchange": to.exchange(), "first_id": first_id}
        to.emit([likeliest], GREEDY, **best, num_padding=num_padding)
        to.emit([Argmax()], GREEDY, **best, token_ids=self.best_ids.ctypes.data, **of_ranks)

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
            parts,
            len(rows),
            len(logit_rows),
            rows.ctypes.data,
            starts.ctypes.data,
            counts.ctypes.data,
            logit_rows.ctypes.data,
            tokens.ctypes.data,
            tokens.strides[0] // 4,
            block_tables.ctypes.data,
            table_stride,
            group_stride,
            0 if nanoseconds is None else nanoseconds.ctypes.data,
        )
        if self.exchange is not None and self.exchange.has_given_up:
            raise EngineDeadError(RANK_LOST)

    def run_timed(self, parts: int, *arrays: NDArray[np.int32]) -> list[OpTime]:
        """`run`, which also gives the time and work of each native op that ran, in order."""
        nanoseconds = np.zeros(len(self.ops), np.int64)
        self.run(parts, *arrays, nanoseconds=nanoseconds)
        _, starts, counts, logit_rows, *_ = arrays
        requests = tuple(zip(starts.tolist(), counts.tolist(), strict=True))
        kv_format = self.kv_layers[0].format if self.kv_layers else KvFormat.f32
        whole = StepShape(requests, len(logit_rows), kv_format, self.limits.tile_rows)
        times = []
        costs: dict[tuple[int, bool], Cost] = {}
        for index, taken in enumerate(nanoseconds.tolist()):
            if not taken:
                continue
            instruction = self.ops[index]
            step = whole if index < self._num_body_ops else whole.of_logit_rows()
            alike = (self._first_alike[index], index < self._num_body_ops)
            if (cost := costs.get(alike)) is None:
                cost = costs[alike] = instruction.measured(step, self.counters_of)
            name = self._names[index].replace(ROWS, str(step.num_tokens))
            loads = tuple(self._emitter.counts[instruction].tolist()) if instruction in self._emitter.counts else ()
            layer = self.layers.get(instruction)
            times.append(OpTime(name, taken / 1e3, cost.flops, cost.num_bytes, cost.arithmetic, loads, layer))
        return times

    def counters_of(self, instruction: Instruction) -> NDArray[np.int32]:
        """Return the counters of an instruction, as the last step left them."""
        return self._emitter.counts[instruction]


class _Emitter:
    """An `Emitter` (`kernels/instruction.py`) that adds to a native plan, and keeps the memory of its ops alive.

    Attributes: `instructions`: of each op; `counts`: the counters of each counting instruction.
    """

    def __init__(self, planned: PlannedModel, adapter_sites: Callable[[str], int] | None) -> None:
        program, self._native, self._weights = planned.program, planned.native, planned.weights
        self.instructions: list[Instruction] = []
        self.counts: dict[Instruction, NDArray[np.int32]] = {}
        self._kv_layers, self._exchange, self._adapter_sites = planned.kv_layers, planned.exchange, adapter_sites
        self._ahead = plan_ahead(program.body)
        self._first_layer = 0 if program.layers is None else program.layers.start
        self._rows: dict[Buffer, NDArray[np.uint8]] = {}
        self._memory: list[NDArray[Any]] = []
        self._parts, self._parameter_types = 0, parameter_types()
        self._options: dict[str, Any] = {}

    def emit(self, instructions: Sequence[Instruction], parts: int, **options: Any) -> None:
        """Emit instructions that belong to these parts, each with these further fields."""
        self._parts, self._options = parts, options
        for instruction in instructions:
            self._emitting = instruction
            instruction.emit(self)

    def allocate(self, chosen: BufferPlaces, num_rows: int) -> None:
        """Give buffers their memory, of `num_rows` rows each."""
        memory = [self.add_memory(num_rows * row_bytes).reshape(num_rows, row_bytes) for row_bytes in chosen.row_bytes]
        for buffer, place in chosen.places.items():
            # Only the logits, which callers overwrite and sample from, have rows without padding.
            stride = min(buffer.row_bytes, memory[place].shape[1])
            self._rows[buffer] = memory[place].reshape(-1)[: num_rows * stride].reshape(num_rows, stride)

    def add_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory that starts at a multiple of 64."""
        memory = np.empty(num_bytes + 64, np.uint8)
        self._memory.append(memory)
        start = -memory.ctypes.data % 64
        return memory[start : start + num_bytes]

    def values(self, buffer: Buffer) -> NDArray[np.float32]:
        """Return a view of fp32 values. Shapes: [rows, width]."""
        return self._rows[buffer].view(np.float32)[:, : buffer.width]

    # --- See `Emitter` ----------------------------------------------------------------------

    def push(self, op: str, **values: Any) -> None:
        given = {name: self._native_value(value) for name, value in values.items() if value is not None}
        getattr(self._native, op)(**{"parts": self._parts, **given}, **self._options)
        self.instructions.append(self._emitting)

    def _native_value(self, value: Any) -> Any:
        if isinstance(value, Buffer | Columns):
            return self.rows(value)
        if not isinstance(value, self._parameter_types):
            return value
        return self._weights.weight(value) if len(value.shape) == 2 else self._weights.vector_address(value)

    def rows(self, value: Buffer | Columns, stride_bytes: int | None = None) -> _native.Rows:
        buffer = value.buffer if isinstance(value, Columns) else value
        return _native.Rows(self.address(value), stride_bytes or self._rows[buffer].shape[1], buffer.type)

    def address(self, value: Buffer | Columns) -> int:
        if isinstance(value, Columns):
            return self.address(value.buffer) + 4 * value.start
        return self._rows[value].ctypes.data

    def constant(self, values: Any) -> int:
        self._memory.append(np.array(values.tolist(), np.float32))
        return self._memory[-1].ctypes.data

    def counters(self, instruction: Instruction, count: int) -> int:
        return self.counts.setdefault(instruction, np.zeros(count, np.int32)).ctypes.data

    def kv_layer(self, layer_index: int) -> _native.KvLayer:
        return self._kv_layers[layer_index - self._first_layer]

    def exchange(self) -> int:
        if self._exchange is None:
            raise NotTraceableError("a collective of several ranks")
        return self._exchange.address

    def adapter_site(self, weight: Any) -> int | None:
        if self._adapter_sites is None or self._parts != BODY:
            return None
        return self._adapter_sites(self._weights.name_of(weight))

    def ahead(self, instruction: Instruction) -> _native.KvAhead | None:
        if instruction not in self._ahead:
            return None
        layer_index, window, begin, end = self._ahead[instruction]
        return _native.KvAhead(self.kv_layer(layer_index), window, begin, end)
