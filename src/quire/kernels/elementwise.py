"""Sums, products, multiples, gated rows and soft caps of values: one class per native op.

Next to read: `instruction.py`.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, Likeliest, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.tracing import SIZES, Call, NotTraceableError, Symbol, same_sizes
from quire.lazy_torch import Tensor, torch


def _gated_sizes(x: Symbol, gates: Symbol) -> tuple[int, ...]:
    if gates.sizes not in ((1,), x.sizes):
        raise NotTraceableError(f"gates {gates} of {x}")
    return x.sizes


def _joined_sizes(a: Symbol, b: Symbol) -> tuple[int, ...]:
    if len(a.sizes) != 1 or len(b.sizes) != 1:
        raise NotTraceableError(f"{a} and {b} joined")
    return (a.num_columns + b.num_columns,)


SIZES.update(join=_joined_sizes, soft_cap=same_sizes, scale_by=same_sizes, gate_rows=_gated_sizes)


@kernel
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Hold values within -cap … cap: out = cap · tanh(x / cap).     (Gemma 2, sec. 2)

    Shapes: x [...] -> [...]. Dtypes: bf16, fp16 or fp32, returned the same.
    """
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


@kernel
def scale_by(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply by a parameter: out = factor[0] · x.

    Shapes: x [...]; factor [1] -> [...]. Dtypes: bf16, fp16 or fp32, returned as x.
    """
    return (x.float() * factor.float()).to(x.dtype)


@kernel
def gate_rows(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply each row by the sigmoid of its gate, or each value by that of its own: out = x / (1 + exp(-gates)).

    Shapes: x [T, E]; gates [T, G], G being 1 or E -> [T, E]. Dtypes: bf16, fp16 or fp32, returned the same.
    """
    return (x.float() * torch.sigmoid(gates.float())).to(x.dtype)


@kernel
def join(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate the columns of two values, E and F wide.

    Shapes: a [T, E]; b [T, F] -> [T, C]. Dtypes: bf16, fp16 or fp32, returned the same.
    """
    return torch.cat((a, b), 1)


class Elementwise(Instruction):
    """Base of ops that compute each value of `out` from its column: the native op `op` has its fields, and `width`.

    `flops`: operations that a value counts as.
    """

    __slots__ = ()
    op: ClassVar[str]
    flops: ClassVar[int] = 1
    out: Buffer

    def emit(self, to: Emitter) -> None:
        own = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        to.push(self.op, **own, width=self.out.width)

    def cost(self, step: StepShape) -> Cost:
        return Cost(self.flops * step.num_tokens * self.out.width, 4 * len(self.parameters))


@dataclass(eq=False, frozen=True, slots=True)
class Add(Elementwise):
    """out = a + b, fp32."""

    op = "add"
    a: Columns
    b: Columns
    out: Buffer


@dataclass(eq=False, frozen=True, slots=True)
class Multiply(Elementwise):
    """out = a · b."""

    op = "multiply"
    a: Columns
    b: Columns
    out: Buffer


@dataclass(eq=False, frozen=True, slots=True)
class Scale(Elementwise):
    """out = factor · x, or with `by`, a parameter of one value, by[0] · x."""

    op = "scale"
    x: Columns
    out: Buffer
    factor: float
    by: Any = None


@dataclass(eq=False, frozen=True, slots=True)
class SoftCap(Elementwise):
    """out = cap · tanh(x / cap)."""

    op, flops = "soft_cap", 10
    x: Columns
    out: Buffer
    cap: float

    def likeliest(self, before: Likeliest | None) -> Likeliest | None:
        return replace(before, soft_cap=self.cap) if before is not None and not before.soft_cap else None


@dataclass(eq=False, frozen=True, slots=True)
class GateRows(Elementwise):
    """out = x · sigmoid(gates), one gate per row or `per_value`."""

    op = "gate_rows"
    x: Columns
    gates: Columns
    out: Buffer
    per_value: bool


@dataclass(eq=False, frozen=True, slots=True)
class Join(Instruction):
    """out = the columns of a, then those of b."""

    a: Columns
    b: Columns
    out: Buffer

    def emit(self, to: Emitter) -> None:
        for source, start in ((self.a, 0), (self.b, self.a.width)):
            to.push("activate", x=source, out=Columns(self.out, start, source.width), width=source.width)

    def cost(self, step: StepShape) -> Cost:
        return Cost()


@lowers("join")
def _lower_join(to: Lowering, call: Call) -> None:
    a, b = map(to.columns, call.arguments)
    to.append(Join(a, b, to.result(call)))


@lowers("add", "multiply")
def _lower_of_two(to: Lowering, call: Call) -> None:
    a, b = map(to.columns, call.arguments)
    is_sum = call.operation == "add"
    to.append((Add if is_sum else Multiply)(a, b, to.result(call, takes_type=not is_sum)))


@lowers("gate_rows")
def _lower_gate_rows(to: Lowering, call: Call) -> None:
    x, gates = call.arguments
    out = to.result(call, takes_type=True)
    to.append(GateRows(to.columns(x), to.columns(gates), out, gates.num_columns > 1))


@lowers("scale", "scale_by", "soft_cap")
def _lower_of_one(to: Lowering, call: Call) -> None:
    x, number = call.arguments
    source = to.columns(x)
    out = to.in_place(call) or to.result(call, takes_type=True)
    if call.operation == "scale_by":
        to.append(Scale(source, out, 1.0, number))
    else:
        to.append((Scale if call.operation == "scale" else SoftCap)(source, out, number))
