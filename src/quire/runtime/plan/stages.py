"""`cut`: the part of a program that one stage of a pipeline runs.

A program is cut between two layers, where the fewest values are alive: the residual stream, as a rule. These pass to
the next stage; cosines and sines depend on positions only, and each stage computes its own. Must not know models.
Next to read: `runtime/ranks.py` for the runner of a stage, `lower.py` for programs.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire._native import RowType
from quire.errors import UnsupportedModelError
from quire.kernels.instruction import Buffer, Cost, Emitter, Instruction, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.tracing import Call
from quire.runtime.plan.lower import Program

ONE_TOKEN = StepShape(requests=((0, 1),), num_logit_rows=1)


@dataclass(eq=False, frozen=True, slots=True)
class Receive(Instruction):
    """Values of the stage before, which are there when the plan runs."""

    values: tuple[Buffer, ...]

    def emit(self, to: Emitter) -> None:
        """See `Instruction`. Nothing is to be done: it gives the values their place and lifetime."""

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`."""
        return Cost()


@lowers("given")
def _lower_given(to: Lowering, call: Call) -> None:
    to.notes["given"] = (to.result(call),)
    to.append(Receive(to.notes["given"]))


class Send(Receive):
    """Values for the next stage, taken after the plan has run."""

    __slots__ = ()

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`."""
        return Cost(bytes_sent=4 * step.num_tokens * sum(buffer.width for buffer in self.values))


def cut(program: Program, stage: int, num_stages: int) -> Program:
    """Return the instructions of a stage, whose layers are counted from `first_layer` on; the last has the head.

    Raises: UnsupportedModelError if the program has fewer places to cut.
    """
    body, is_last = program.body, stage == num_stages - 1
    cuts = [0, *choose_cuts(program, num_stages), len(body)]
    spans = lifetimes(body)
    inputs, outputs = (_live(spans, at) for at in cuts[stage : stage + 2])
    part = body[cuts[stage] : cuts[stage + 1]]
    used = {buffer for instruction in part for buffer in instruction.buffers}
    angles = [item for item in body[: cuts[stage]] if item.is_repeated and used.intersection(item.buffers)]
    received, sent = ([Receive(inputs)] if inputs else []), ([Send(outputs)] if outputs else [])
    layers = _layers(part)
    return replace(
        program,
        body=[*received, *angles, *part, *sent],
        hidden=program.hidden if is_last else outputs[0],
        head=program.head if is_last else [],
        logits=program.logits if is_last else Buffer(0),
        inputs=inputs,
        outputs=outputs,
        layers=range(min(layers), max(layers) + 1),
    )


def choose_cuts(program: Program, num_stages: int) -> list[int]:
    """Return where stages 1 … `num_stages` - 1 begin in the body: the costliest stage reads as few bytes as possible.

    Raises: UnsupportedModelError.
    """
    body, places = program.body, possible_cuts(program.body)
    if len(places) < num_stages - 1:
        raise UnsupportedModelError(
            f"pipeline_parallel_size={num_stages} needs {num_stages - 1} places between layers where a stage may end,"
            f" and this model has {len(places)}: --pipeline-parallel-size {len(places) + 1} fits"
        )
    costs = [instruction.cost(ONE_TOKEN).bytes_read for instruction in body]
    until = [0, *itertools.accumulate(costs)]
    head = sum(instruction.cost(ONE_TOKEN).bytes_read for instruction in program.head)
    # best[i]: bytes of the costliest stage, and the cuts, of stages that end at places[i].
    best = [(until[at], [at]) for at in places]
    for count in range(2, num_stages):
        best = [
            min((max(most, until[at] - until[cuts[-1]]), [*cuts, at]) for most, cuts in best[:index] if cuts)
            if index >= count - 1
            else (until[-1] + head, [])
            for index, at in enumerate(places)
        ]
    return min((max(most, until[-1] + head - until[cuts[-1]]), cuts) for most, cuts in best if cuts)[1]


def possible_cuts(body: Sequence[Instruction]) -> list[int]:
    """Return the places between two layers with the fewest values alive, where all of them are fp32."""
    spans = lifetimes(body)
    layer_at = [(index, layer) for index, item in enumerate(body) for layer in _layers([item])]
    found = []
    for layer in sorted({layer for _, layer in layer_at})[:-1]:
        first = max(index for index, other in layer_at if other <= layer) + 1
        last = min(index for index, other in layer_at if other > layer)
        widths = {}
        for at in range(first, last + 1):
            buffers = _live(spans, at)
            if buffers and all(buffer.type == RowType.f32 for buffer in buffers):
                widths[at] = sum(buffer.width for buffer in buffers)
        if widths:
            found.append(min(widths, key=lambda at: (widths[at], -at)))
    return found


def lifetimes(body: Sequence[Instruction]) -> dict[Buffer, tuple[int, int]]:
    """Return the first and the last instruction that uses each buffer, but for angles."""
    angles = {buffer for item in body if item.is_repeated for buffer in item.buffers}
    found: dict[Buffer, tuple[int, int]] = {}
    for index, instruction in enumerate(body):
        for buffer in instruction.buffers:
            if buffer not in angles:
                found[buffer] = found.get(buffer, (index, index))[0], index
    return found


def _live(spans: Mapping[Buffer, tuple[int, int]], at: int) -> tuple[Buffer, ...]:
    """Return the buffers that are written before instruction `at` and read from there on."""
    return tuple(buffer for buffer, (first, last) in spans.items() if first < at <= last)


def _layers(body: Sequence[Instruction]) -> list[int]:
    return [item.cache_layer for item in body if item.cache_layer is not None]
