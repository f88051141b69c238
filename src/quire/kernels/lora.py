"""`LowRank`: the first half of a linear layer's adapters, y += B (A x): the products A x of the rows that have one.

The layer's own instruction adds B times them before anything else follows its sums, so that plans without adapters
have the same instructions (`native/ops/lora.h`). Next to read: `linear.py`, then `runtime/adapter_pool.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.kernels.instruction import Columns, Cost, Emitter, Instruction, StepShape

ADAPTERS = 16
"""The part of a plan that runs only in steps with adapters; plan.h knows it."""
MAX_PARTS = 8
"""Parts of a layer's outputs with matrices of their own, as queries, keys and values: `kMostLoraParts`."""


@dataclass(eq=False, frozen=True, slots=True)
class LowRank(Instruction):
    """A x for the linear layer of `weight`, with A of each row's adapter. Its work depends on the adapters."""

    x: Columns
    weight: Any

    def emit(self, to: Emitter) -> None:
        to.push("lora", x=self.x, width=self.x.width, site=to.adapter_site(self.weight), parts=ADAPTERS)

    def cost(self, step: StepShape) -> Cost:
        return Cost()


def with_adapters(body: Sequence[Instruction]) -> list[Instruction]:
    """Return a program's body with a `LowRank` before each linear layer."""
    found: list[Instruction] = []
    for instruction in body:
        if instruction.adapter_input is not None:
            found.append(LowRank(instruction.adapter_input, instruction.named_weight))
        found.append(instruction)
    return found
