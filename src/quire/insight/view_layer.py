"""`view_layer`: the instructions of one layer in their order, with shapes and work, and the values that pass between.

A lane is a value from the instruction that writes it to the last that reads it; the residual stream is the lane that
goes through the whole layer. All is read from the traced program of `quire explain`.
Next to read: `explain/phases.py`, `picture.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

from quire.errors import ConfigError
from quire.insight.explain.explanation import explain
from quire.insight.explain.phases import Phase
from quire.insight.explain.report import scaled
from quire.insight.explain.settings import Settings
from quire.insight.picture import Kind, Picture, Row, counted
from quire.kernels.instruction import Buffer, Instruction, Work
from quire.runtime.plan.lower import layers_of
from quire.runtime.plan.stages import lifetimes
from quire.weights.checkpoint import Checkpoint

KINDS = {
    "read": Kind("○", "#9ecae1", "read"),
    "written": Kind("●", "#1f77b4", "written"),
    "added": Kind("⊕", "#d95f02", "added to: the residual sum"),
    "kept": Kind("│", "#dddddd", "kept for a later instruction"),
    "free": Kind(" ", "#ffffff", ""),
}


def view_layer(checkpoint: Checkpoint, settings: Settings, *, layer: int, start: int) -> Picture:
    """Draw one layer for a step of `settings.ctx` - `start` tokens from position `start` on.

    Raises: ConfigError for a layer that the model has not; as `explain`.
    """
    explained = explain(checkpoint, settings)
    config, rank, count = explained.config, explained.rank, settings.ctx - start
    phase = replace(explained.phases[0], step=replace(explained.phases[0].step, requests=((start, count),)))
    layers = layers_of(rank.body, lambda parameter: rank.names[id(parameter)])
    num_layers = config.model.num_layers
    indices = [index for index, found in enumerate(layers) if found == layer]
    if not indices:
        raise ConfigError(f"--layer {layer}: the model has layers 0 to {num_layers - 1}")
    alike = [other for other in range(num_layers) if _work(phase, layers, other) == _work(phase, layers, layer)]
    rows = _rows(phase, rank.body, indices)
    costs = [phase.costs[index][1] for index in indices]
    flops, num_bytes, sent = (
        sum(getattr(cost, name) for cost in costs) for name in ("flops", "num_bytes", "bytes_sent")
    )
    whole = phase.flops, phase.num_bytes
    return Picture(
        f"{checkpoint.files.name}: layer {layer} of {num_layers}, {counted(count, 'token')}"
        + f" after {start} in the KV cache" * (start > 0)
        + f", rank 0 of {settings.tp}" * (settings.tp > 1),
        f"A row is an instruction, from top to bottom, a lane a value [{count}, width]. {len(alike)} of"
        f" {num_layers} layers have the same work. Bytes are those of weights and KV cache. Activations, biases and"
        " residual sums are part of the instruction whose result they change.",
        f"{scaled(flops, 'FLOP')} and {scaled(num_bytes, 'B')} = {flops / max(num_bytes, 1):.3g} FLOP/B"
        + f", {scaled(sent, 'B')} sent" * (sent > 0)
        + f"; {len(alike)} layers have {len(alike) * flops / whole[0]:.0%} of the FLOPs and"
        f" {len(alike) * num_bytes / whole[1]:.0%} of the bytes of the step",
        "src/quire/insight/explain/phases.py",
        KINDS,
        rows,
    )


def _work(phase: Phase, layers: Sequence[int | None], layer: int) -> list[tuple[str, str, object]]:
    """Return what tells a layer from another one: the names, shapes and costs of its instructions."""
    works = (works for works, found in zip(phase.works, layers, strict=False) if found == layer)
    return [(work.name, work.shape, work.cost) for item in works for work in item]


def _rows(phase: Phase, body: Sequence[Instruction], indices: Sequence[int]) -> list[Row]:
    """Return a row for each part of each instruction, with its lanes. A part that is not the last only reads."""
    lanes = _lanes(body, indices)
    num_lanes = 1 + max(lane for lane, _, _ in lanes.values())
    names, drawn, told = [], [], []
    for index in indices:
        for work in (works := phase.works[index]):
            cells, results = ["free"] * num_lanes, []
            for buffer, (lane, first, last) in lanes.items():
                if first <= index <= last:
                    cells[lane] = _cell(body[index], buffer, is_new=first == index)
                if first <= index <= last and cells[lane] in ("written", "added"):
                    results.append(buffer)
                    if work is not works[-1]:
                        cells[lane] = "free" if first == index else "kept"
                elif cells[lane] == "read" and work is not works[0]:
                    cells[lane] = "kept"
            names.append(work.name)
            drawn.append([cell for lane in cells for cell in (lane, "free")])
            told.append(_numbers(phase, body[index], work, results if work is works[-1] else []))
    widths = [max(map(len, column)) for column in zip(*told, strict=True)]
    remarks = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in told)
    return list(map(Row, names, drawn, remarks))


def _lanes(body: Sequence[Instruction], indices: Sequence[int]) -> dict[Buffer, tuple[int, int, int]]:
    """Return per value that the layer uses its lane, and the first and the last instruction that use it."""
    found: dict[Buffer, tuple[int, int, int]] = {}
    for buffer, (first, last) in lifetimes(body).items():
        if first <= indices[-1] and last >= indices[0]:
            taken = {lane for lane, _, end in found.values() if end >= first}
            found[buffer] = next(lane for lane in range(len(found) + 1) if lane not in taken), first, last
    return found


def _cell(item: Instruction, buffer: Buffer, *, is_new: bool) -> str:
    if is_new:
        return "written"
    if getattr(item, "add", False) and getattr(item, "out", None) is buffer:
        return "added"
    return "read" if buffer in item.buffers else "kept"


def _numbers(phase: Phase, item: Instruction, work: Work, results: Sequence[Buffer]) -> tuple[str, ...]:
    """Return the columns of a part's remark: its result, its weight, m×k×n, FLOPs, bytes and intensity."""
    weight, packing, cost = item.named_weight, getattr(item, "packing", None), work.cost
    sent = f"{scaled(cost.bytes_sent, 'B')} sent" if cost.bytes_sent else ""
    return (
        f"→ [{phase.step.num_tokens}, {results[0].width}] {results[0].type.name}" if results else "",
        "" if weight is None else f"weight {list(weight.shape)}{f' {packing.name}' if packing else ''}",
        work.shape,
        scaled(cost.flops, "FLOP") if cost.flops else "",
        scaled(cost.num_bytes, "B") if cost.num_bytes else sent,
        f"{cost.flops / cost.num_bytes:.3g} FLOP/B" if cost.flops and cost.num_bytes else "",
    )
