"""Sums, products, multiples, gated rows and soft caps of values: one class per native op.

Next to read: `instruction.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape
from quire.kernels.likeliest import Likeliest
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.tracing import SIZES, Call, NotTraceableError, Symbol, same_sizes
from quire.lazy_torch import Tensor, torch


def _gated_sizes(x: Symbol, gates: Symbol) -> tuple[int, ...]:
    if gates.sizes not in ((1,), x.sizes):
        raise NotTraceableError(f"gates {gates} of {x}")
    return x.sizes


SIZES.update(soft_cap=same_sizes, scale_by=same_sizes, gate_rows=_gated_sizes)


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


@dataclass(eq=False, frozen=True, slots=True)
class _OfTwo(Instruction):
    """A value made of two, column by column."""

    a: Columns
    b: Columns
    out: Buffer

    def emit(self, to: Emitter) -> None:
        op = type(self).__name__.lower()
        to.push(op, a=to.rows(self.a), b=to.rows(self.b), out=to.rows(self.out), width=self.out.width)

    def cost(self, step: StepShape) -> Cost:
        return Cost(step.num_tokens * self.out.width)


class Add(_OfTwo):
    """out = a + b, fp32."""

    __slots__ = ()


class Multiply(_OfTwo):
    """out = a · b."""

    __slots__ = ()


@dataclass(eq=False, frozen=True, slots=True)
class Scale(Instruction):
    """out = factor · x, or with `by`, a parameter of one value, by[0] · x."""

    x: Columns
    out: Buffer
    factor: float
    by: Any = None

    def emit(self, to: Emitter) -> None:
        by = {} if self.by is None else {"by": to.vector(self.by)}
        to.push("scale", x=to.rows(self.x), out=to.rows(self.out), width=self.out.width, factor=self.factor, **by)

    def cost(self, step: StepShape) -> Cost:
        return Cost(step.num_tokens * self.out.width, 0 if self.by is None else 4)


@dataclass(eq=False, frozen=True, slots=True)
class SoftCap(Instruction):
    """out = cap · tanh(x / cap). The hyperbolic tangent counts as 10 operations."""

    x: Columns
    out: Buffer
    cap: float

    def emit(self, to: Emitter) -> None:
        to.push("soft_cap", x=to.rows(self.x), out=to.rows(self.out), width=self.out.width, cap=self.cap)

    def cost(self, step: StepShape) -> Cost:
        return Cost(10 * step.num_tokens * self.out.width)

    def likeliest(self, before: Likeliest | None) -> Likeliest | None:
        return replace(before, soft_cap=self.cap) if before is not None and not before.soft_cap else None


@dataclass(eq=False, frozen=True, slots=True)
class GateRows(Instruction):
    """out = x · sigmoid(gates), one gate per row or per value."""

    x: Columns
    gates: Columns
    out: Buffer

    def emit(self, to: Emitter) -> None:
        to.push(
            "gate_rows", x=to.rows(self.x), gates=to.rows(self.gates), out=to.rows(self.out), width=self.out.width,
            per_value=self.gates.width > 1,
        )  # fmt: skip

    def cost(self, step: StepShape) -> Cost:
        return Cost(step.num_tokens * self.out.width)


@lowers("add")
def _lower_add(to: Lowering, call: Call) -> None:
    a, b = call.arguments
    to.append(Add(to.columns(a), to.columns(b), to.result(call)))


@lowers("multiply")
def _lower_multiply(to: Lowering, call: Call) -> None:
    a, b = call.arguments
    to.append(Multiply(to.columns(a), to.columns(b), to.result(call, takes_type=True)))


@lowers("gate_rows")
def _lower_gate_rows(to: Lowering, call: Call) -> None:
    x, gates = call.arguments
    to.append(GateRows(to.columns(x), to.columns(gates), to.result(call, takes_type=True)))


@lowers("scale", "scale_by", "soft_cap")
def _lower_of_one(to: Lowering, call: Call) -> None:
    x, number = call.arguments
    source = to.columns(x)
    out = to.in_place(call) or to.result(call, takes_type=True)
    if call.operation == "scale_by":
        to.append(Scale(source, out, 1.0, number))
    else:
        to.append((Scale if call.operation == "scale" else SoftCap)(source, out, number))
