"""`lower`: a traced model to the program of its plan.

How each operation is lowered stands beside it in `kernels/`. Next to read: `kernels/lowering.py`, then `emit.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire._native import Activation
from quire.kernels.collective import AllGather
from quire.kernels.elementwise import SoftCap
from quire.kernels.instruction import (
    Buffer,
    Columns,
    Convert,
    Cost,
    Emitter,
    Instruction,
    Packing,
    StepShape,
    product_cost,
)
from quire.kernels.linear import Gemm
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.tracing import Call, NotTraceableError
from quire.runtime.plan.trace import TracedModel

PackingOf = Callable[[Any], Packing]


@dataclass(slots=True)
class Program:
    """A forward and its head.

    Fields:
        body: up to the hidden states.
        hidden: fp32 [T, E], the body's result.
        head: from hidden states to logits; its rows are those that need logits.
        logits: fp32 [S, V], the head's result.
        num_fused: calls that became part of another's instruction, by operation.
        inputs, outputs, layers: of a stage (`stages.py`) the values that it receives and sends, and its layers; a stage
            that is not the last has no head, and `hidden` is its first output.
    """

    body: list[Instruction]
    hidden: Buffer
    head: list[Instruction]
    logits: Buffer
    num_fused: dict[str, int] = field(default_factory=dict)
    inputs: tuple[Buffer, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    layers: range | None = None

    @property
    def num_before_logits(self) -> int:
        """Instructions of the head before the product that makes the logits."""
        return max(index for index, instruction in enumerate(self.head) if isinstance(instruction, Gemm))

    @property
    def shares(self) -> Columns | None:
        """The logits of this rank's share of the vocabulary, if the head ends with their way to other ranks."""
        last = self.head[-1] if self.head else None
        return last.x if isinstance(last, AllGather) else None

    @property
    def likeliest(self) -> "Likeliest | None":
        """The instruction that finds the likeliest tokens without logits.

        It replaces the head's last product, a cap of the logits, and their way to other ranks; None if the head ends
        otherwise.
        """
        gemm, *after = self.head[self.num_before_logits :]
        after = [instruction for instruction in after if not isinstance(instruction, AllGather)]
        caps = [instruction.cap for instruction in after if isinstance(instruction, SoftCap)]
        if not isinstance(gemm, Gemm) or gemm.activation != Activation.none or gemm.add:
            return None
        if len(caps) < len(after) or len(caps) > 1:
            return None
        return Likeliest(gemm.weight, gemm.bias, gemm.packing, gemm.x, *caps)


@dataclass(eq=False, frozen=True, slots=True)
class Likeliest(Instruction):
    """The column of the largest logit of each row, of a product whose results are compared and not written.

    `soft_cap` 0: logits are compared as they are.
    """

    weight: Any
    bias: Any
    packing: Packing
    x: Columns
    soft_cap: float = 0.0

    def emit(self, to: Emitter) -> None:
        """See `Instruction`. Needs the memory that `PlannedModel` gives it."""
        weight, bias = to.weight(self.weight), to.vector(self.bias)
        to.push("head", weight=weight, bias=bias, x=to.rows(self.x), soft_cap=self.soft_cap)

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`."""
        return product_cost(step, tuple(self.weight.shape), self.packing, self.bias)


@dataclass(eq=False, frozen=True, slots=True)
class Argmax(Instruction):
    """The likeliest tokens of all threads from those of each, which `Likeliest` left."""

    def emit(self, to: Emitter) -> None:
        """See `Instruction`."""
        to.push("argmax")

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`."""
        return Cost()


def lower(traced: TracedModel, packing_of: PackingOf) -> Program:
    """Instructions for both traces. Raises: NotTraceableError."""
    body = Lowering(packing_of)
    hidden = body.run(traced.forward.calls, traced.hidden)
    head = Lowering(packing_of)
    head.notes["hidden"] = hidden
    logits = head.run(traced.head.calls, traced.logits)
    if not any(isinstance(instruction, Gemm) for instruction in head.instructions):
        raise NotTraceableError("a head without a linear layer")
    instructions = _cap_shares(head.instructions)
    return Program(body.instructions, hidden.buffer, instructions, logits.buffer, body.num_fused)


def _cap_shares(head: list[Instruction]) -> list[Instruction]:
    """Cap the logits before they are sent to other ranks, not after: each rank caps its share, with the same result."""
    gather, cap = head[-2:]
    if not isinstance(gather, AllGather) or not isinstance(cap, SoftCap):
        return head
    capped = Buffer(gather.x.width)
    columns = Columns(capped, 0, capped.width)
    return [
        *head[:-2],
        SoftCap(gather.x, capped, cap.cap),
        AllGather(columns, cap.out, gather.num_ranks, gather.ring_bytes),
    ]


@lowers("hidden")
def _lower_hidden(to: Lowering, call: Call) -> None:
    """The rows that need logits, in the type that the head reads."""
    to.append(Convert(to.notes["hidden"], to.result(call, takes_type=True), takes_logit_rows=True))
