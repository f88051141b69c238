"""`lower`: a traced model to the program of its plan.

How each operation is lowered stands beside it in `kernels/`. Next to read: `kernels/lowering.py`, then `emit.py`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.kernels.instruction import Buffer, Columns, Convert, Instruction, Likeliest, Packing
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.tracing import Call, NotTraceableError, Symbol, Trace
from quire.runtime.plan.trace import TracedModel

PackingOf = Callable[[Any], Packing]
_LAYER = re.compile(r"(^|\.)(\d+)(?=\.)")


@dataclass(slots=True)
class Program:
    """A forward and its head.

    Fields:
        body: up to the hidden states.
        hidden: fp32 [T, E], the body's result.
        head: from hidden states to logits; its rows are those that need logits.
        logits: fp32 [S, V], the head's result.
        num_fused: calls that became part of another's instruction, by operation.
        predictors: of each layer that predicts further tokens; its input is hidden states.
        joins: makes the hidden states that an EAGLE head reads of the `outputs`, side by side.
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
    predictors: "list[Program]" = field(default_factory=list)
    joins: "Program | None" = None

    @property
    def num_before_logits(self) -> int:
        """Instructions of the head before the product that makes the logits."""
        return max(index for index, instruction in enumerate(self.head) if instruction.product is not None)

    @property
    def shares(self) -> Columns | None:
        """The logits of this rank's share of the vocabulary, if the head ends with their way to other ranks."""
        collective = self.head[-1].collective if self.head else None
        return None if collective is None or collective.is_sum else collective.share

    @property
    def likeliest(self) -> Likeliest | None:
        """The instruction that finds the likeliest tokens without logits.

        It replaces the head from its last product on; None if one of these instructions has no such form.
        """
        found: Likeliest | None = None
        for instruction in self.head[self.num_before_logits :]:
            found = instruction.likeliest(found)
        return found


def lower(traced: TracedModel, packing_of: PackingOf) -> Program:
    """Instructions for both traces. Raises: NotTraceableError."""
    body = Lowering(packing_of)
    hidden = body.run(traced.forward.calls, traced.hidden, traced.kept)
    head = Lowering(packing_of)
    head.notes["hidden"] = hidden
    logits = head.run(traced.head.calls, traced.logits)
    if all(instruction.product is None for instruction in head.instructions):
        raise NotTraceableError("a head without a linear layer")
    return Program(
        body.instructions,
        hidden.buffer,
        head.instructions,
        logits.buffer,
        body.num_fused,
        inputs=body.notes.get("given", ()),
        outputs=tuple(body.columns(symbol).buffer for symbol in traced.kept),
    )


def lower_body(trace: Trace, result: Symbol, packing_of: PackingOf) -> Program:
    """Instructions for a trace without a head. Raises: NotTraceableError."""
    body = Lowering(packing_of)
    hidden = body.run(trace.calls, result)
    return Program(body.instructions, hidden.buffer, [], Buffer(0), inputs=body.notes.get("given", ()))


@lowers("keep")
def _lower_keep(to: Lowering, call: Call) -> None:
    """A copy: the residual stream is added to in place."""
    to.append(Convert(to.columns(call.arguments[0]), to.result(call)))


@lowers("hidden")
def _lower_hidden(to: Lowering, call: Call) -> None:
    """The rows that need logits, in the type that the head reads."""
    to.append(Convert(to.notes["hidden"], to.result(call, takes_type=True), takes_logit_rows=True))


def split_name(name: str) -> tuple[int | None, str]:
    """Split a parameter's name into the index of its layer, None outside of layers, and its role in the layer."""
    match = _LAYER.search(name)
    return (int(match[2]), name[match.end() + 1 :]) if match else (None, name)


def layers_of(body: Sequence[Instruction], name_of: Callable[[Any], str]) -> list[int | None]:
    """Return the layer of each instruction: that of its parameters, else that of the instruction before it.

    None: outside of layers. `name_of`: a parameter's name.
    """
    found: list[int | None] = []
    for instruction in body:
        names = [name_of(parameter) for parameter in instruction.parameters]
        before = found[-1] if found else None
        found.append(split_name(names[0])[0] if names else before)
    return found
