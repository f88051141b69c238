"""The likeliest token of each row: a head's product, whose results are compared and not written.

Next to read: `linear.py`, whose instruction it replaces; `native/ops/head.h`.
"""

from dataclasses import dataclass
from typing import Any

from quire.kernels.instruction import Columns, Cost, Emitter, Instruction, Packing, Product, StepShape


@dataclass(eq=False, frozen=True, slots=True)
class Likeliest(Instruction):
    """The column of the largest logit of each row. `soft_cap` 0: logits are compared as they are."""

    weight: Any
    bias: Any
    packing: Packing
    x: Columns
    soft_cap: float = 0.0

    def emit(self, to: Emitter) -> None:
        """See `Instruction`. Needs the memory that `PlannedModel` gives it."""
        to.push("head", weight=self.weight, bias=self.bias, x=self.x, soft_cap=self.soft_cap)

    def cost(self, step: StepShape) -> Cost:
        return self.product.cost(step, self.bias)

    @property
    def product(self) -> Product:
        return Product(self.weight, self.packing)


@dataclass(eq=False, frozen=True, slots=True)
class Argmax(Instruction):
    """The likeliest tokens of all threads from those of each, which `Likeliest` left."""

    def emit(self, to: Emitter) -> None:
        to.push("argmax")

    def cost(self, step: StepShape) -> Cost:
        return Cost()
