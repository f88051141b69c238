"""Sums and concatenations over the ranks of a tensor-parallel group, as instructions.

The native ops work in memory that the ranks of one machine share (`native/ranks/exchange.h`).
Next to read: `layers/group.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.kernels.elementwise import SoftCap
from quire.kernels.instruction import (
    Buffer,
    Collective,
    Columns,
    Cost,
    Emitter,
    Instruction,
    Likeliest,
    StepShape,
    Work,
)
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.tracing import Call, Symbol


@dataclass(frozen=True, slots=True)
class RecordingGroup:
    """A rank whose collectives record themselves in a trace.

    `ring_bytes`: size of the values that go round a ring of ranks; None: the ranks share memory, and fp32 values.
    """

    rank: int
    size: int
    vocab_size: int
    ring_bytes: int | None = None

    def all_reduce(self, x: Any) -> Any:
        """Record a sum over all ranks."""
        return self._record("all_reduce", x, x.sizes)

    def all_gather(self, x: Any) -> Any:
        """Record a concatenation. Only logits are gathered: columns beyond the vocabulary are padding."""
        return self._record("all_gather", x, (min(self.size * x.num_columns, self.vocab_size),))

    def _record(self, operation: str, x: Symbol, sizes: tuple[int, ...]) -> Symbol:
        return x.trace.record(operation, (x, self.size, self.ring_bytes), sizes)


@dataclass(eq=False, frozen=True, slots=True)
class AllReduce(Instruction):
    """out = the sum of x over `num_ranks` ranks; or with `add` out += it. `ring_bytes`: see `RecordingGroup`."""

    x: Columns
    out: Buffer
    num_ranks: int
    ring_bytes: int | None
    add: bool = False

    def emit(self, to: Emitter) -> None:
        to.push("all_reduce", x=self.x, out=self.out, width=self.x.width, exchange=to.exchange(), add=self.add)

    @property
    def collective(self) -> Collective:
        return self._collective(is_sum=True)

    def _collective(self, *, is_sum: bool) -> Collective:
        is_ring, value_bytes = self.ring_bytes is not None, self.ring_bytes or 4
        return Collective(is_sum, self.x, self.out.width, value_bytes, self.num_ranks, is_ring)

    def explain(self, step: StepShape) -> list[Work]:
        one = self.collective
        formula = f"{step.num_tokens} · {one.width} · {one.value_bytes} = {one.num_bytes(step)} B of result"
        return [Work(f"{type(self).__name__} of {{before}}", self.cost(step), formula)]

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`. A rank writes its values once to shared memory.

        A ring sends each value 2 (N - 1) / N times per rank (Patarasuk & Yuan 2009).
        """
        num_added, sent = step.num_tokens * self.out.width if self.add else 0, self.collective.num_bytes(step)
        if self.ring_bytes:
            sent = 2 * (self.num_ranks - 1) * sent // self.num_ranks
        return Cost(num_added, bytes_sent=sent)


class AllGather(AllReduce):
    """out = the columns of all ranks, in the order of the ranks, without the padding of the last ones."""

    __slots__ = ()

    def emit(self, to: Emitter) -> None:
        widths = {"width": self.x.width, "out_width": self.out.width}
        to.push("all_gather", x=self.x, out=self.out, **widths, exchange=to.exchange())

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`. A ring sends each share but one once per rank."""
        num_times = self.num_ranks - 1 if self.ring_bytes else 1
        return Cost(bytes_sent=num_times * step.num_tokens * self.x.width * self.collective.value_bytes)

    @property
    def collective(self) -> Collective:
        return self._collective(is_sum=False)

    def likeliest(self, before: Likeliest | None) -> Likeliest | None:
        """See `Instruction`. Ranks compare the largest results of each instead."""
        return before


@dataclass(eq=False, frozen=True, slots=True)
class SharedNorm(Instruction):
    """RMS norm of vectors that the ranks hold in parts of equal width; x and out are this rank's part."""

    x: Columns
    out: Buffer
    weight: Any
    epsilon: float

    def emit(self, to: Emitter) -> None:
        to.push(
            "shared_norm",
            x=self.x,
            out=self.out,
            weight=self.weight,
            width=self.x.width,
            epsilon=self.epsilon,
            exchange=to.exchange(),
        )

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`. Ranks exchange one fp32 value per token."""
        return Cost(4 * step.num_tokens * self.out.width, 4 * self.out.width, bytes_sent=4 * step.num_tokens)


@lowers("shared_norm")
def _lower_norm(to: Lowering, call: Call) -> None:
    x, weight, epsilon = call.arguments
    to.append(SharedNorm(to.columns(x), to.result(call, takes_type=True), weight, epsilon))


@lowers("all_reduce")
def _lower_sum(to: Lowering, call: Call) -> None:
    """Fused with the sum: its addition to a residual that nothing else reads."""
    x, num_ranks, ring_bytes = call.arguments
    source, users = to.columns(x), to.users(call)
    if len(users) == 1 and (sums := to.add_in_place(call, users[0], source.buffer)) is not None:
        to.append(AllReduce(source, sums, num_ranks, ring_bytes, add=True))
    else:
        to.append(AllReduce(source, to.result(call), num_ranks, ring_bytes))


@lowers("all_gather")
def _lower_columns(to: Lowering, call: Call) -> None:
    """Fused: a cap that alone reads the result. Each rank caps its share before it is sent, with the same result."""
    x, num_ranks, ring_bytes = call.arguments
    source, users = to.columns(x), to.users(call)
    if [user.operation for user in users] == ["soft_cap"]:
        (call,), share = users, Columns(Buffer(source.width), 0, source.width)
        to.take_in(call)
        to.append(SoftCap(source, share.buffer, call.arguments[1]))
        source = share
    to.append(AllGather(source, to.result(call), num_ranks, ring_bytes))
