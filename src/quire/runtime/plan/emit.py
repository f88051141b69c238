"""`PlannedModel`: a program with buffers, weights and cache at their final addresses, ready to run steps.

Buffers share memory when they are not alive at the same time. Nothing is allocated after this.
Next to read: `native/plan/plan.h`, then `runtime/forward.py`, which runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire import _native
from quire._native import RowType
from quire.runtime.plan.instructions import (
    Activate,
    Add,
    Attend,
    Buffer,
    Columns,
    Embed,
    Gemm,
    Instruction,
    Norm,
    Program,
    Rotary,
    WriteKv,
    touched,
)
from quire.runtime.plan.packed_weights import PackedWeights

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


def place_buffers(body: Sequence[Instruction], result: Buffer) -> Placement:
    """Give each buffer a place from its first to its last use; `result` keeps its own to the end.

    An instruction's inputs and outputs never share one: its threads read and write at the same time.
    """
    last_use = {buffer: index for index, instruction in enumerate(body) for buffer in touched(instruction)}
    last_use[result] = len(body)
    placement = Placement({}, [])
    free: set[int] = set()
    for index, instruction in enumerate(body):
        buffers = list(dict.fromkeys(touched(instruction)))
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


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a product fetches for the attention after it: from share `begin` to share `end` of its keys and values."""

    attend: Attend
    begin: float
    end: float


def plan_ahead(body: Sequence[Instruction]) -> dict[int, Ahead]:
    """Per index of a product before an attention its part, in proportion to its weights."""
    parts: dict[int, Ahead] = {}
    waiting: list[tuple[int, int]] = []
    for index, instruction in enumerate(body):
        match instruction:
            case Gemm(weight):
                waiting.append((index, weight.numel()))
            case Attend():
                total, before = sum(size for _, size in waiting), 0
                for gemm, size in waiting:
                    parts[gemm] = Ahead(instruction, before / total, (before + size) / total)
                    before += size
                waiting = []
    return parts


class PlannedModel:
    """One model's plan and the memory it works in.

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
    ) -> None:
        """`pool`: the threads that run it, or how many of its own."""
        self.program = program
        self.limits = limits
        self.native = _native.Plan(pool, limits.max_tokens, max(limits.max_requests, limits.max_logit_rows))
        self._weights = weights
        self._kv_layers = kv_layers
        self._memory: list[torch.Tensor] = []
        self._addresses: dict[Buffer, int] = {}
        self._place_buffers()
        self.hidden = self._float_rows(program.hidden, limits.max_tokens)
        self.logits = torch.empty(limits.max_logit_rows, program.vocab_size)
        self.best_ids: NDArray[np.int32] = np.zeros(limits.max_logit_rows, np.int32)
        ahead = plan_ahead(program.body)
        for index, instruction in enumerate(program.body):
            if isinstance(instruction, Gemm):
                self._emit_gemm(instruction, ahead.get(index))
            else:
                self._emit(instruction)
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
    ) -> None:
        """Compute parts of one step; the GIL is released meanwhile.

        Shapes: rows, starts, counts [R]: each request's row in the tables, its first new position and its number of
            new tokens; logit_rows [S] tokens of the step; tokens [rows, …]; block_tables [groups, rows, …].
        """
        group_stride, table_stride = block_tables.strides[0] // 4, block_tables.strides[1] // 4
        self.native.run(
            parts, len(rows), len(logit_rows), rows.ctypes.data, starts.ctypes.data, counts.ctypes.data,
            logit_rows.ctypes.data, tokens.ctypes.data, tokens.strides[0] // 4, block_tables.ctypes.data,
            table_stride, group_stride,
        )  # fmt: skip

    # --- Memory ---------------------------------------------------------------------------

    def _place_buffers(self) -> None:
        program, limits = self.program, self.limits
        placement = place_buffers(program.body, program.hidden)
        memory = [self._allocate(row_bytes * limits.max_tokens) for row_bytes in placement.row_bytes]
        self._addresses = {buffer: memory[place] for buffer, place in placement.places.items()}
        self._addresses[program.head_input] = self._allocate(program.head_input.row_bytes * limits.max_logit_rows)

    def _allocate(self, num_bytes: int) -> int:
        self._memory.append(torch.empty(num_bytes + 64, dtype=torch.uint8))
        return -(-self._memory[-1].data_ptr() // 64) * 64

    def _float_rows(self, buffer: Buffer, num_rows: int) -> torch.Tensor:
        """An fp32 buffer as a tensor [num_rows, width]."""
        address = self._addresses[buffer]
        owner = next(
            memory for memory in self._memory if memory.data_ptr() <= address < memory.data_ptr() + memory.numel()
        )
        size = buffer.row_bytes * num_rows
        whole = owner[address - owner.data_ptr() :][:size].view(torch.float32)
        return whole.view(num_rows, buffer.row_bytes // 4)[:, : buffer.width]

    # --- Ops ------------------------------------------------------------------------------

    def _rows(self, buffer: Buffer) -> _native.Rows:
        return _native.Rows(self._addresses[buffer], buffer.row_bytes, buffer.type)

    def _columns(self, columns: Columns) -> int:
        return self._addresses[columns.buffer] + 4 * columns.start

    def _emit(self, instruction: Instruction) -> None:
        native, weights = self.native, self._weights
        match instruction:
            case Embed(table, out, offset, of_positions):
                native.embed(weights.weight(table), self._rows(out), offset, of_positions)
            case Rotary(frequencies, cos, sin):
                self._memory.append(frequencies.detach().float().contiguous())
                address = self._memory[-1].data_ptr()
                native.rotary(address, self._addresses[cos], self._addresses[sin], frequencies.shape[0])
            case Norm(x, out, weight, bias, epsilon, subtract_mean):
                weight_at, bias_at = weights.vector_address(weight), weights.vector_address(bias)
                native.norm(self._rows(x), self._rows(out), weight_at, bias_at, x.width, epsilon, subtract_mean)
            case WriteKv():
                self._emit_write_kv(instruction)
            case Attend(q, out, num_heads, scale, window, layer_index):
                kv = self._kv_layers[layer_index]
                stride = q.buffer.row_bytes // 4
                native.attend(self._columns(q), stride, self._rows(out), num_heads, window, scale, kv)
            case Activate(x, out, activation, gated):
                native.activate(self._rows(x), self._rows(out), out.width, activation, gated)
            case Add(a, b, out):
                native.add(self._rows(a), self._rows(b), self._rows(out), out.width)

    def _emit_gemm(self, op: Gemm, ahead: Ahead | None) -> None:
        fetched = None
        if ahead is not None:
            kv = self._kv_layers[ahead.attend.layer_index]
            fetched = _native.KvAhead(kv, ahead.attend.window, ahead.begin, ahead.end)
        self.native.gemm(
            self._weights.weight(op.weight), self._weights.vector_address(op.bias), self._rows(op.x),
            self._rows(op.out), op.activation, op.gated, op.add, ahead=fetched,
        )  # fmt: skip

    def _emit_write_kv(self, op: WriteKv) -> None:
        cos, sin = (0, 0) if op.rotation is None else (self._addresses[buffer] for buffer in op.rotation)
        self.native.write_kv(
            self._columns(op.q), self._columns(op.k), self._columns(op.v), op.q.buffer.row_bytes // 4, op.num_heads,
            self._weights.vector_address(op.q_norm), self._weights.vector_address(op.k_norm), op.epsilon, cos, sin,
            self._kv_layers[op.layer_index],
        )  # fmt: skip

    def _emit_head(self) -> None:
        """Rows of the hidden states in the head's type, then either the logits or the likeliest tokens."""
        native, program = self.native, self.program
        weight = self._weights.weight(program.head_weight)
        bias = self._weights.vector_address(program.head_bias)
        x = self._rows(program.head_input)
        native.activate(
            self._rows(program.hidden), x, program.hidden.width, of_logit_rows=True, from_logit_rows=True,
            parts=LOGITS | GREEDY,
        )  # fmt: skip
        logits = _native.Rows(self.logits.data_ptr(), 4 * program.vocab_size, RowType.f32)
        native.gemm(weight, bias, x, logits, of_logit_rows=True, parts=LOGITS)
        max_rows = self.limits.max_logit_rows
        values = self._allocate(4 * max_rows * native.num_threads)
        ids = self._allocate(4 * max_rows * native.num_threads)
        native.head(weight, bias, x, values, ids, max_rows, parts=GREEDY)
        native.argmax(values, ids, max_rows, self.best_ids.ctypes.data, parts=GREEDY)
