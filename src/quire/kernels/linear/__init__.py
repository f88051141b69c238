"""Dense linear layer, and in plans what follows it. Next to read: `reference.py`, then `packed.py` for the CPU."""

from dataclasses import dataclass
from typing import Any

import torch

from quire._native import Activation, WeightFormat, wanted_rows
from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape, product_cost
from quire.kernels.linear import packed, reference
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import Kernel
from quire.kernels.tracing import SIZES, Call, NotTraceableError, Symbol

KERNEL = Kernel("linear", "linear", {"reference": reference.linear, "packed": packed.linear}, preferred={"*": "packed"})
TILE = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """out = x @ weight.T + bias.

    Shapes: x [T, I]; weight [O, I], plain or from `pack_weight`; bias [O] or None -> [T, O].
    Dtypes: all bf16, fp16 or fp32; sums in fp32; returns x.dtype.
    """
    return KERNEL.on(x.device.type)(x, weight, bias)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """The weight in the layout that `linear` reads fastest on its device; the same tensor where there is none.

    Exact: values are moved, not changed. Only `linear` can read the result.
    Shapes: weight [O, I]. Dtypes: any; bf16 and fp32 are packed on CPU.
    """
    return packed.pack_weight(weight) if KERNEL.version_on(weight.device.type) == "packed" else weight


@dataclass(eq=False, frozen=True, slots=True)
class Gemm(Instruction):
    """A linear layer, then its activation or gate, and with `add` the sum with what is in `out`."""

    weight: Any
    bias: Any
    format: WeightFormat
    x: Columns
    out: Buffer
    activation: Activation = Activation.none
    gated: bool = False
    add: bool = False

    def emit(self, to: Emitter) -> None:
        """See `Instruction`."""
        to.push(
            "gemm", weight=to.weight(self.weight), bias=to.vector(self.bias), x=to.rows(self.x), out=to.rows(self.out),
            activation=self.activation, gated=self.gated, add=self.add, ahead=to.ahead(self),
        )  # fmt: skip

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`."""
        return product_cost(step.num_tokens, tuple(self.weight.shape), self.format, self.bias)


@lowers("linear")
def _lower(to: Lowering, call: Call) -> None:
    """Fused with the product: the activation or the sum that alone reads its result."""
    x, weight, bias = call.arguments
    weight_format = to.format_of(weight)
    source = to.typed(x, wanted_rows(weight_format))
    users = to.users(call)
    only = users[0] if len(users) == 1 and users[0].arguments[0].is_whole else None
    if only is not None and only.operation in ("activate", "gate"):
        gated = only.operation == "gate"
        # The halves of a gate must begin with a tile of outputs.
        if not gated or only.sizes[0] % TILE == 0:
            to.take_in(only)
            activation, out = Activation[only.arguments[1]], to.result(only, takes_type=True)
            to.append(Gemm(weight, bias, weight_format, source, out, activation, gated))
            return
    if len(users) == 1 and (sums := to.add_in_place(call, users[0], source.buffer)) is not None:
        to.append(Gemm(weight, bias, weight_format, source, sums, add=True))
        return
    to.append(Gemm(weight, bias, weight_format, source, to.result(call, takes_type=True)))


def _sizes(x: Symbol, weight: Any, bias: Any) -> tuple[int, ...]:
    if x.sizes != (weight.shape[1],):
        raise NotTraceableError(f"a linear layer {list(weight.shape)} of {x}")
    return (weight.shape[0],)


SIZES["linear"] = _sizes
