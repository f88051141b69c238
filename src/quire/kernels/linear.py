"""Dense linear layer, and in plans what follows it: of a head, the likeliest tokens. Next to read: `lowering.py`."""

from dataclasses import dataclass
from typing import Any

from quire._native import Activation
from quire.kernels.instruction import (
    Buffer,
    Columns,
    Cost,
    Emitter,
    Instruction,
    Likeliest,
    Packing,
    Product,
    StepShape,
)
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.tracing import SIZES, Call, NotTraceableError, Symbol
from quire.lazy_torch import Tensor, functional

TILE = 16


@kernel.with_traits(weight="weight")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """out = x @ weight.T + bias.

    Shapes: x [T, I]; weight [O, I]; bias [O] or None -> [T, O].
    Dtypes: all bf16, fp16 or fp32; sums in fp32; returns x.dtype.
    """
    return functional.linear(x, weight, bias)


@dataclass(eq=False, frozen=True, slots=True)
class Argmax(Instruction):
    """The likeliest tokens of all threads from those of each, which `Likeliest` left."""

    def emit(self, to: Emitter) -> None:
        to.push("argmax")

    def cost(self, step: StepShape) -> Cost:
        return Cost()


@dataclass(eq=False, frozen=True, slots=True)
class Gemm(Instruction):
    """A linear layer, then its activation or gate, and with `add` the sum with what is in `out`."""

    fetches_ahead = True
    weight: Any
    bias: Any
    packing: Packing
    x: Columns
    out: Buffer
    activation: Activation = Activation.none
    gated: bool = False
    add: bool = False

    def emit(self, to: Emitter) -> None:
        to.push(
            "gemm",
            weight=self.weight,
            bias=self.bias,
            x=self.x,
            out=self.out,
            activation=self.activation,
            gated=self.gated,
            add=self.add,
            ahead=to.ahead(self),
            lora=to.adapter_site(self.weight),
        )

    def cost(self, step: StepShape) -> Cost:
        return self.product.cost(step, self.bias)

    @property
    def product(self) -> Product:
        return Product(self.weight, self.packing)

    @property
    def adapter_input(self) -> Columns:
        return self.x

    def likeliest(self, before: Likeliest | None) -> Likeliest | None:
        if self.activation != Activation.none or self.add:
            return None
        return Likeliest(self.weight, self.bias, self.packing, self.x)


@lowers("linear")
def _lower(to: Lowering, call: Call) -> None:
    """Lower the product together with the activation, gate or sum that follows, if nothing else reads the product."""
    x, weight, bias = call.arguments
    packing = to.packing_of(weight)
    source = to.typed(x, packing.rows)
    users = to.users(call)
    only = users[0] if len(users) == 1 and users[0].arguments[0].is_whole else None
    if only is not None and only.operation in ("activate", "gate"):
        gated = only.operation == "gate"
        # The halves of a gate must begin with a tile of outputs.
        if not gated or only.sizes[0] % TILE == 0:
            to.take_in(only)
            activation, out = Activation[only.arguments[1]], to.result(only, takes_type=True)
            to.append(Gemm(weight, bias, packing, source, out, activation, gated))
            return
    if len(users) == 1 and (sums := to.add_in_place(call, users[0], source.buffer)) is not None:
        to.append(Gemm(weight, bias, packing, source, sums, add=True))
        return
    to.append(Gemm(weight, bias, packing, source, to.result(call, takes_type=True)))


def _sizes(x: Symbol, weight: Any, bias: Any) -> tuple[int, ...]:
    if x.sizes != (weight.shape[1],):
        raise NotTraceableError(f"a linear layer {list(weight.shape)} of {x}")
    return (weight.shape[0],)


SIZES["linear"] = _sizes
