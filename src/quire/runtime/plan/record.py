"""`record`: a program to its native ops, which name memory and weights instead of having their addresses.

Next to read: `emit.py`, which gives the ops their addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire import _native
from quire._native import Activation
from quire.kernels.instruction import Buffer, Columns, Instruction
from quire.kernels.linear import Gemm
from quire.kernels.paged_attention.instructions import Attend
from quire.runtime.plan.emit import (
    BODY,
    GREEDY,
    LOGITS,
    SHARES,
    ActivationOf,
    AddressOf,
    AheadOf,
    ConstantOf,
    CountersOf,
    KvLayerOf,
    NativeOp,
    NativeOps,
    OfEngine,
    Place,
    Placement,
    PlanLimits,
    PlannedModel,
    RowsAt,
    VectorOf,
    WeightOf,
    place_buffers,
)
from quire.runtime.plan.lower import Argmax, Program
from quire.runtime.plan.packed_weights import PackedWeights


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


@dataclass(frozen=True, slots=True)
class Recording:
    """A program's native ops; per op its instruction; and per counting instruction the index of its counters."""

    program: Program
    ops: NativeOps
    instructions: list[Instruction]
    counters: dict[Instruction, int]

    @property
    def weight_names(self) -> frozenset[str]:
        """The parameters that its ops read."""
        values = [value for op in self.ops.ops for value in op.values.values()]
        return frozenset(value.name for value in values if isinstance(value, WeightOf | VectorOf))


def record(program: Program, weights: PackedWeights, exchange: _native.Exchange | None = None) -> Recording:
    """Record the native ops of a program. `exchange`: with the ranks that share the model."""
    recorder = _Recorder(program, weights)
    recorder.place(place_buffers(program.body, program.hidden), "max_tokens")
    recorder.emit(program.body, BODY)
    num_body_ops = len(recorder.ops)
    recorder.add_place(program.logits, Place(4 * program.logits.width, "max_logit_rows"))
    gives_likeliest = False
    if program.head:
        recorder.place(place_buffers(program.head, program.logits, (program.hidden, program.logits)), "max_logit_rows")
        _record_head(recorder, exchange)
        gives_likeliest = program.likeliest is not None
    hidden, logits, *passed = (
        (recorder.rows(buffer), buffer.width)
        for buffer in (program.hidden, program.logits, *program.inputs, *program.outputs)
    )
    ops = NativeOps(
        recorder.ops, num_body_ops, recorder.places, hidden, logits, recorder.constants, recorder.num_counters,
        gives_likeliest, passed[: len(program.inputs)], passed[len(program.inputs) :],
        None if program.layers is None else (program.layers.start, program.layers.stop),
        None if program.shares is None else (recorder.rows(program.shares), program.shares.width),
    )  # fmt: skip
    return Recording(program, ops, recorder.instructions, recorder.counter_index)


def planned_model(
    program: Program,
    weights: PackedWeights,
    kv_layers: Sequence[_native.KvLayer],
    limits: PlanLimits,
    pool: _native.ThreadPool | int,
    exchange: _native.Exchange | None = None,
) -> PlannedModel:
    """Record a program and give it its memory. See `PlannedModel`."""
    return PlannedModel(record(program, weights, exchange), weights, kv_layers, limits, pool, exchange)


def _record_head(to: "_Recorder", exchange: _native.Exchange | None) -> None:
    """Rows of the hidden states in the head's type, then either the logits or the likeliest tokens."""
    program = to.program
    likeliest, num_shared = program.likeliest, program.num_before_logits
    logits = LOGITS | SHARES if program.shares is not None else LOGITS
    to.emit(program.head[:num_shared], logits | GREEDY if likeliest else logits, of_logit_rows=True)
    to.emit(program.head[num_shared:-1], logits, of_logit_rows=True)
    to.emit(program.head[-1:], LOGITS, of_logit_rows=True)
    if likeliest is None:
        return
    values, ids = (to.add_place(Buffer(0), Place(4, "max_logit_rows", True)) for _ in range(2))
    best = {"best_values": AddressOf(values, 0), "best_ids": AddressOf(ids, 0), "max_rows": OfEngine("max_logit_rows")}
    num_padding, of_ranks = 0, {}
    if exchange is not None:
        num_rows = likeliest.weight.shape[0]
        first_id = exchange.rank * num_rows
        num_padding = num_rows - min(max(program.logits.width - first_id, 0), num_rows)
        of_ranks = {"exchange": to.exchange(), "first_id": first_id}
    to.emit([likeliest], GREEDY, **best, num_padding=num_padding)
    to.emit([Argmax()], GREEDY, **best, token_ids=OfEngine("best_ids"), **of_ranks)


@dataclass(slots=True)
class _Recorder:
    """An `Emitter` (`kernels/instruction.py`) that writes down."""

    program: Program
    weights: PackedWeights
    ops: list[NativeOp] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    constants: list[list[float]] = field(default_factory=list)
    num_counters: list[int] = field(default_factory=list)
    counter_index: dict[Instruction, int] = field(default_factory=dict)
    _place_of: dict[Buffer, int] = field(default_factory=dict)
    _ahead: dict[Instruction, tuple[Attend, float, float]] = field(init=False)
    _emitting: Instruction = field(init=False)
    _first_layer: int = field(init=False)
    _parts: int = 0
    _options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ahead = plan_ahead(self.program.body)
        self._first_layer = 0 if self.program.layers is None else self.program.layers.start

    def emit(self, instructions: Sequence[Instruction], parts: int, **options: Any) -> None:
        """Record instructions that belong to these parts."""
        self._parts, self._options = parts, options
        for instruction in instructions:
            self._emitting = instruction
            instruction.emit(self)

    def place(self, placement: Placement, rows: str) -> None:
        """Add the places of a placement. `rows`: the limit on their rows."""
        first = len(self.places)
        self.places += [Place(row_bytes, rows) for row_bytes in placement.row_bytes]
        self._place_of |= {buffer: first + place for buffer, place in placement.places.items()}

    def add_place(self, buffer: Buffer, place: Place) -> int:
        """Add a place for one buffer; returns its index."""
        self.places.append(place)
        self._place_of[buffer] = len(self.places) - 1
        return len(self.places) - 1

    # --- See `Emitter` ----------------------------------------------------------------------

    def push(self, op: str, **values: Any) -> None:
        fields = {name: ActivationOf(value.name) if isinstance(value, Activation) else value
                  for name, value in (values | self._options).items()}  # fmt: skip
        self.ops.append(NativeOp(op, self._parts, fields))
        self.instructions.append(self._emitting)

    def rows(self, value: Buffer | Columns, stride_bytes: int | None = None) -> RowsAt:
        buffer = value.buffer if isinstance(value, Columns) else value
        stride = stride_bytes or (4 * buffer.width if buffer is self.program.logits else buffer.row_bytes)
        at = self.address(value)
        return RowsAt(at.place, at.offset, stride, buffer.type.name)

    def address(self, value: Buffer | Columns) -> AddressOf:
        if isinstance(value, Columns):
            return AddressOf(self._place_of[value.buffer], 4 * value.start)
        return AddressOf(self._place_of[value], 0)

    def weight(self, parameter: Any) -> WeightOf:
        return WeightOf(self.weights.name_of(parameter))

    def vector(self, parameter: Any) -> VectorOf | int:
        return 0 if parameter is None else VectorOf(self.weights.name_of(parameter))

    def constant(self, values: Any) -> ConstantOf:
        self.constants.append(values.tolist())
        return ConstantOf(len(self.constants) - 1)

    def counters(self, instruction: Instruction, count: int) -> CountersOf:
        if instruction not in self.counter_index:
            self.counter_index[instruction] = len(self.num_counters)
            self.num_counters.append(count)
        return CountersOf(self.counter_index[instruction])

    def kv_layer(self, layer_index: int) -> KvLayerOf:
        return KvLayerOf(layer_index - self._first_layer)

    def exchange(self) -> OfEngine:
        return OfEngine("exchange")

    def ahead(self, instruction: Instruction) -> AheadOf | None:
        if instruction not in self._ahead:
            return None
        attend, begin, end = self._ahead[instruction]
        return AheadOf(attend.layer_index - self._first_layer, attend.window, begin, end)
