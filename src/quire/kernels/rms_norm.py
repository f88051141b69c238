"""RMS norm over the last axis, and the instruction of all norms. Next to read: `layer_norm.py`."""

import math
from dataclasses import dataclass
from typing import Any

from quire._native import Activation
from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.tracing import SIZES, Call, Symbol, norm_sizes
from quire.lazy_torch import Tensor, functional

SIZES["rms_norm"] = norm_sizes


@kernel.with_traits(takes_in=("rope", "rms_norm"))
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Scale each row to root mean square 1, then by `weight`, or without one by 1.

    out[…, i] = x[…, i] / sqrt(mean_i x[…, i]² + epsilon) · weight[i]     (Zhang & Sennrich 2019)
    A longer weight has values of their own for each index of the axis before, as for groups of columns.

    Shapes: x [..., E]; weight [W] or None, W being E or the product of the last two axes -> [..., E].
    Dtypes: x, weight bf16, fp16 or fp32; sums in fp32; returns x.dtype.
    """
    if weight is None or len(weight) == x.shape[-1]:
        return functional.rms_norm(x, x.shape[-1:], weight, epsilon)
    return functional.rms_norm(x.float(), x.shape[-1:], None, epsilon).to(x.dtype) * weight.view(x.shape[-2:])


@dataclass(eq=False, frozen=True, slots=True)
class Norm(Instruction):
    """RMS norm, or layer norm if `subtract_mean`, of each row or of each of its `groups`, such as heads.

    `add`: onto what is in `out`. `gates`: their activation multiplies x, or without `gates_first` the result.
    """

    x: Columns
    out: Buffer
    weight: Any
    bias: Any
    epsilon: float
    subtract_mean: bool
    groups: int = 1
    add: bool = False
    gates: Columns | None = None
    activation: Activation = Activation.none
    gates_first: bool = False

    def emit(self, to: Emitter) -> None:
        to.push(
            "norm",
            x=self.x,
            out=self.out,
            weight=self.weight,
            bias=self.bias,
            width=self.out.width // self.groups,
            epsilon=self.epsilon,
            subtract_mean=self.subtract_mean,
            groups=self.groups,
            add=self.add,
            gates=self.gates,
            activation=self.activation,
            gates_first=self.gates_first,
            weight_per_group=self.weight is not None and int(self.weight.shape[0]) * self.groups != self.out.width,
        )

    def cost(self, step: StepShape) -> Cost:
        vectors = sum(4 * int(vector.shape[0]) for vector in (self.weight, self.bias) if vector is not None)
        flops = 4 + 2 * self.subtract_mean + self.add + 11 * (self.gates is not None)
        return Cost(flops * step.num_tokens * self.out.width, vectors)


@lowers("rms_norm")
def _lower(to: Lowering, call: Call) -> None:
    """Fused: the gates that alone read the result, or the sum, as behind a block that has norms around it."""
    x, weight, epsilon = call.arguments
    if len(x.sizes) == 2 and (weight is None or len(weight) == x.sizes[-1]) and to.waits(call):
        return
    source, users, groups = to.columns(x), to.users(call), x.num_columns // x.sizes[-1]
    gated = _gated(to, call)
    if gated is not None:
        product, gates = gated
        for each in (product, gates.call):
            to.take_in(each)
        gated_by = to.columns(gates.call.arguments[0]), Activation[gates.call.arguments[1]]
        out = to.result(product, takes_type=True)
        to.append(Norm(source, out, weight, None, epsilon, False, groups, False, *gated_by))
        return
    sums = to.add_in_place(call, users[0], source.buffer) if len(users) == 1 else None
    out = to.result(call, takes_type=True) if sums is None else sums
    to.append(Norm(source, out, weight, None, epsilon, False, groups, add=sums is not None))


def _gated(to: Lowering, call: Call) -> tuple[Call, Symbol] | None:
    """The product of a result with a later activation of a known value, where nothing else reads either."""
    users = to.users(call)
    product = users[0] if len(users) == 1 and users[0].operation == "multiply" else None
    if product is None or product.sizes != (math.prod(call.sizes),):
        return None
    a, b = product.arguments
    gates = b if a.call is call else a
    if gates.call.operation != "activate" or to.users(gates.call) != [product] or to.has_values(gates):
        return None
    return (product, gates) if gates.is_whole and to.has_values(gates.call.arguments[0]) else None


def lower_gated_input(to: Lowering, gates: Call) -> bool:
    """Lower a norm of x times an activation where that is its only use and x is known already; False where not."""
    users = to.users(gates)
    product = users[0] if len(users) == 1 and users[0].operation == "multiply" else None
    norms = [] if product is None else to.users(product)
    if product is None or len(norms) != 1 or norms[0].operation != "rms_norm":
        return False
    norm, (a, b) = norms[0], product.arguments
    x, (normed, weight, epsilon) = b if a.call is gates else a, norm.arguments
    if x.call is gates or not to.has_values(x) or not normed.is_whole:
        return False
    for each in (product, norm):
        to.take_in(each)
    gated_by = to.columns(gates.arguments[0]), Activation[gates.arguments[1]], True
    out, groups = to.result(norm, takes_type=True), normed.num_columns // normed.sizes[-1]
    to.append(Norm(to.columns(x), out, weight, None, epsilon, False, groups, False, *gated_by))
    return True
