"""Sums and concatenations over the ranks of a tensor-parallel group, as instructions.

No native op computes them: a program that has them tells the cost of a rank's step (`explain/`) and is never emitted.
Next to read: `layers/group.py`.
"""

from dataclasses import dataclass

from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.tracing import Call, NotTraceableError


@dataclass(eq=False, frozen=True, slots=True)
class AllReduce(Instruction):
    """out = the sum of x over `num_ranks` ranks, sent as values of `value_bytes` bytes."""

    x: Columns
    out: Buffer
    num_ranks: int
    value_bytes: int

    def emit(self, to: Emitter) -> None:
        """See `Instruction`."""
        raise NotTraceableError("a collective of several ranks")

    def num_bytes(self, step: StepShape) -> int:
        """Bytes of the result: T · width · bytes."""
        return step.num_tokens * self.out.width * self.value_bytes

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`. A ring sends each value 2 (N - 1) / N times per rank (Patarasuk & Yuan 2009)."""
        return Cost(bytes_sent=2 * (self.num_ranks - 1) * self.num_bytes(step) // self.num_ranks)


class AllGather(AllReduce):
    """out = the columns of all ranks, in the order of the ranks."""

    __slots__ = ()

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`. A ring sends each value but the rank's own once."""
        return Cost(bytes_sent=(self.num_ranks - 1) * self.num_bytes(step) // self.num_ranks)


CLASSES = {"all_reduce": AllReduce, "all_gather": AllGather}


@lowers(*CLASSES)
def _lower(to: Lowering, call: Call) -> None:
    x, num_ranks, value_bytes = call.arguments
    to.append(CLASSES[call.operation](to.columns(x), to.result(call), num_ranks, value_bytes))
