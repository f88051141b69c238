"""`PlannedModel`: a program with buffers, weights and cache at their final addresses, ready to run steps.

Buffers share memory when they are not alive at the same time. Nothing is allocated after this.
Next to read: `native/plan/plan.h`, then `runtime/forward.py`, which runs it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire import _native
from quire._native import KvFormat
from quire.errors import EngineDeadError
from quire.events import OpTime
from quire.kernels.instruction import Buffer, Columns, Instruction, StepShape
from quire.kernels.linear import Gemm
from quire.kernels.paged_attention.instructions import Attend
from quire.kernels.tracing import NotTraceableError
from quire.runtime.plan.lower import Argmax, Program
from quire.runtime.plan.packed_weights import PackedWeights

RANK_LOST = "a rank of the model is lost"
BODY, LOGITS, GREEDY = 1, 2, 4
"""Parts of a plan: hidden states; logits of the rows asked for; only the likeliest token of each of these rows."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The largest step: tokens, requests, and rows of logits computed at once."""

    max_tokens: int
    max_requests: int
    max_logit_rows: int


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


def plan_ahead(body: Sequence[Instruction]) -> dict[Instruction, tuple[Attend, float, float]]:
    """Per product before an attention the keys and values that it fetches for it, in proportion to its weights.

    Returns: the attention, and the share of its keys and values where the product begins and ends.
    """
    parts: dict[Instruction, tuple[Attend, float, float]] = {}
    waiting: list[Gemm] = []
    for instruction in body:
        if isinstance(instruction, Gemm):
            waiting.append(instruction)
        elif isinstance(instruction, Attend):
            total, before = sum(gemm.weight.numel() for gemm in waiting), 0
            for gemm in waiting:
                size = gemm.weight.numel()
                parts[gemm] = instruction, before / total, (before + size) / total
                before += size
            waiting = []
    return parts


class PlannedModel:
    """A model's plan and the memory it works in.

    Attributes:
        hidden: fp32 [max_tokens, E]; rows of the last step's tokens.
        logits: fp32 [max_logit_rows, V].
        best_ids: int32 [max_logit_rows]; -1 where logits leave no choice.
    """

    def __init__(
        self,
        program: Program,
        weights: PackedWeights,
        kv_layers: Sequence[_native.KvLayer],
        limits: PlanLimits,
        pool: _native.ThreadPool | int,
        exchange: _native.Exchange | None = None,
    ) -> None:
        """`pool`: the threads that run it, or how many of its own. `exchange`: with the ranks that share the model."""
        self.program = program
        self.limits = limits
        self.native = _native.Plan(pool, limits.max_tokens, max(limits.max_requests, limits.max_logit_rows))
        self.ops: list[Instruction] = []
        """The instruction of each native op, in order."""
        self._weights = weights
        self._kv_layers = kv_layers
        self._exchange = exchange
        self._memory: dict[int, torch.Tensor] = {}
        self._addresses: dict[Buffer, int] = {}
        self._counters: dict[Instruction, NDArray[np.int32]] = {}
        self._ahead = plan_ahead(program.body)
        self._options: dict[str, Any] = {}
        self._emitting = program.body[0]
        self.logits = torch.empty(limits.max_logit_rows, program.logits.width)
        self.best_ids: NDArray[np.int32] = np.zeros(limits.max_logit_rows, np.int32)
        self._place(place_buffers(program.body, program.hidden), limits.max_tokens)
        hidden = self._memory[self._addresses[program.hidden]][: program.hidden.row_bytes * limits.max_tokens]
        self.hidden = hidden.view(torch.float32).view(limits.max_tokens, -1)[:, : program.hidden.width]
        self._emit(program.body, BODY)
        self._num_body_ops = len(self.ops)
        self._addresses[program.logits] = self.logits.data_ptr()
        given = (program.hidden, program.logits)
        self._place(place_buffers(program.head, program.logits, given), limits.max_logit_rows)
        self._emit_head()

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

    def run_timed(self, parts: int, *arrays: NDArray[np.int32]) -> list[OpTime]:
        """`run`, which also gives the time and work of each native op that ran, in order."""
        nanoseconds = np.zeros(len(self.ops), np.int64)
        self.run(parts, *arrays, nanoseconds=nanoseconds)
        _, starts, counts, logit_rows, *_ = arrays
        requests = tuple(zip(starts.tolist(), counts.tolist(), strict=True))
        whole = StepShape(requests, len(logit_rows), self._kv_layers[0].format if self._kv_layers else KvFormat.f32)
        times = []
        for index in np.flatnonzero(nanoseconds).tolist():
            instruction = self.ops[index]
            step = whole if index < self._num_body_ops else whole.of_logit_rows()
            cost = instruction.measured(step, self.counters_of)
            name, num_bytes = instruction.describe(step.num_tokens), cost.bytes_read + cost.bytes_written
            loads = tuple(self._counters[instruction].tolist()) if instruction in self._counters else ()
            microseconds = int(nanoseconds[index]) / 1e3
            times.append(OpTime(name, microseconds, cost.flops, num_bytes, cost.arithmetic, loads))
        return times

    # --- Memory ---------------------------------------------------------------------------

    def _place(self, placement: Placement, num_rows: int) -> None:
        memory = [self._allocate(row_bytes * num_rows) for row_bytes in placement.row_bytes]
        self._addresses |= {buffer: memory[place] for buffer, place in placement.places.items()}

    def _allocate(self, num_bytes: int) -> int:
        memory = torch.empty(num_bytes + 64, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 64 :]
        self._memory[memory.data_ptr()] = memory
        return memory.data_ptr()

    # --- Ops: see `kernels.instruction.Emitter` -------------------------------------------

    def push(self, op: str, **values: Any) -> None:
        getattr(self.native, op)(**values, **self._options)
        self.ops.append(self._emitting)

    def rows(self, value: Buffer | Columns, stride_bytes: int | None = None) -> _native.Rows:
        buffer = value.buffer if isinstance(value, Columns) else value
        stride = stride_bytes or (4 * buffer.width if buffer is self.program.logits else buffer.row_bytes)
        return _native.Rows(self.address(value), stride, buffer.type)

    def address(self, value: Buffer | Columns) -> int:
        if isinstance(value, Columns):
            return self._addresses[value.buffer] + 4 * value.start
        return self._addresses[value]

    def weight(self, parameter: Any) -> _native.Weight:
        return self._weights.weight(parameter)

    def vector(self, parameter: Any) -> int:
        return self._weights.vector_address(parameter)

    def constant(self, values: torch.Tensor) -> int:
        values = values.detach().float().contiguous()
        self._memory[values.data_ptr()] = values
        return values.data_ptr()

    def counters(self, instruction: Instruction, count: int) -> int:
        return self._counters.setdefault(instruction, np.zeros(count, np.int32)).ctypes.data

    def counters_of(self, instruction: Instruction) -> NDArray[np.int32]:
        """Return the counters of an instruction, as the last step left them."""
        return self._counters[instruction]

    def kv_layer(self, layer_index: int) -> _native.KvLayer:
        return self._kv_layers[layer_index]

    def exchange(self) -> int:
        if self._exchange is None:
            raise NotTraceableError("a collective of several ranks")
        return self._exchange.address

    def ahead(self, instruction: Instruction) -> _native.KvAhead | None:
        if instruction not in self._ahead:
            return None
        attend, begin, end = self._ahead[instruction]
        return _native.KvAhead(self.kv_layer(attend.layer_index), attend.window, begin, end)

    def _emit(self, instructions: Sequence[Instruction], parts: int, **options: Any) -> None:
        self._options = {"parts": parts, **options}
        for instruction in instructions:
            self._emitting = instruction
            instruction.emit(self)

    def _emit_head(self) -> None:
        """Rows of the hidden states in the head's type, then either the logits or the likeliest tokens."""
        likeliest, num_shared = self.program.likeliest, self.program.num_before_logits
        self._emit(self.program.head[:num_shared], LOGITS | GREEDY if likeliest else LOGITS, of_logit_rows=True)
        self._emit(self.program.head[num_shared:], LOGITS, of_logit_rows=True)
        if likeliest is None:
            return
        max_rows = self.limits.max_logit_rows
        values, ids = (self._allocate(4 * max_rows * self.native.num_threads) for _ in range(2))
        best = {"best_values": values, "best_ids": ids, "max_rows": max_rows}
        num_padding, of_ranks = 0, {}
        if (ranks := self._exchange) is not None:
            num_rows = likeliest.weight.shape[0]
            first_id = ranks.rank * num_rows
            num_padding = num_rows - min(max(self.program.logits.width - first_id, 0), num_rows)
            of_ranks = {"exchange": ranks.address, "first_id": first_id}
        self._emit([likeliest], GREEDY, **best, num_padding=num_padding)
        self._emit([Argmax()], GREEDY, **best, token_ids=self.best_ids.ctypes.data, **of_ranks)
