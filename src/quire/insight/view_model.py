"""Pictures of one layer of a model: its instructions in their order, with shapes and work, and the values between
them; and the same layer cut over the ranks of a tensor-parallel group.

All is read from the traced program of `quire explain`. Next to read: `explain/phases.py`, `../layers/group.py` for
shares, `picture.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from quire.cache_spec import PagedKV
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.insight.explain.explanation import explain
from quire.insight.explain.phases import Phase
from quire.insight.explain.report import format_value, scaled
from quire.insight.explain.subject import RankWeight, Settings, rank_partitions
from quire.insight.picture import COLOURS, Kind, Picture, Row, counted
from quire.kernels.instruction import Buffer, Instruction, StepShape, Work
from quire.layers.group import LocalGroup, Partition, Share, share_heads
from quire.runtime.plan.lower import layers_of, split_name
from quire.runtime.plan.stages import lifetimes
from quire.weights.checkpoint import Checkpoint

# --- A layer. A lane is a value from the instruction that writes it to the last that reads it -----

VALUE_KINDS = {
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
        VALUE_KINDS,
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


# --- Ranks, from the partitions of the model's own layers -----------------------------------------

WIDTH, MAX_PARTS = 48, 4
MAX_RANKS = 36
"""Ranks have one character each."""
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ONE_TOKEN = StepShape(((0, 1),), 1)


def view_ranks(checkpoint: Checkpoint, settings: Settings, *, layer: int) -> Picture:
    """Draw the matrices of one layer, those before and behind all layers, and the sums between ranks.

    Raises: ConfigError for a layer that the model has not, or for too many ranks; as `explain`.
    """
    tp = settings.tp
    if not 2 <= tp <= MAX_RANKS:
        raise ConfigError(f"--tp {tp}: a picture shows 2 to {MAX_RANKS} ranks")
    explained = explain(checkpoint, settings)
    config, rank = explained.config, explained.rank
    phase = replace(explained.phases[0], step=replace(explained.phases[0].step, requests=ONE_TOKEN.requests))
    layers = layers_of(rank.body, lambda parameter: rank.names[id(parameter)])
    if layer not in layers:
        raise ConfigError(f"--layer {layer}: the model has layers 0 to {config.model.num_layers - 1}")
    drawing = _Drawing(phase, rank_partitions(config, checkpoint, tp), tuple(_heads(config, tp)))
    inside = [index for index, found in enumerate(layers) if found == layer]
    in_layers = [index for index, found in enumerate(layers) if found is not None]
    rows = [
        *drawing.rows(range(in_layers[0])),
        Row(""),
        Row(f"layer {layer}"),
        *drawing.rows(inside),
        Row(""),
        *drawing.rows(range(in_layers[-1] + 1, len(phase.instructions))),
    ]
    sent = [cost for index in inside if (cost := phase.costs[index][1].bytes_sent)]
    return Picture(
        f"{checkpoint.files.name} on {tp} ranks: layer {layer} of {config.model.num_layers}",
        "A bar is the axis along which a matrix is cut, a character the rank that holds this part: rows of a weight"
        " are outputs, columns are inputs. Where columns are cut, each rank has a term of the sum.",
        f"a rank sends {scaled(sum(sent), 'B')} a token in the {len(sent)} sums of a layer,"
        f" {scaled(phase.bytes_sent, 'B')} in the whole model, and holds"
        f" {format_value(rank.weight_bytes, 'B')} of weights",
        "src/quire/layers/group.py",
        _kinds(tp),
        rows,
    )


def _kinds(tp: int) -> Mapping[str, Kind]:
    ranks = {str(rank): Kind(CHARACTERS[rank], COLOURS[rank % len(COLOURS)], f"rank {rank}") for rank in range(tp)}
    return ranks | {
        "several": Kind("#", "#7f7f7f", "several ranks hold the same"),
        "all": Kind("=", "#dddddd", "every rank holds it whole"),
        "sum": Kind("Σ", "#333333", "all ranks exchange values"),
        "gap": Kind(" ", "#ffffff", ""),
    }


class _Drawing:
    """The rows of instructions. `partitions`: of each rank; `heads`: the rows of attention."""

    def __init__(self, phase: Phase, partitions: Sequence[Mapping[str, Partition]], heads: Sequence[Row]) -> None:
        self._phase, self._partitions, self._heads, self._names = phase, partitions, heads, phase.rank.names
        self._weights = {weight.name: weight for weight in phase.rank.weights}

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        """Yield a row for each parameter and each exchange of these instructions, in their order."""
        names: set[str] = set()
        for index in indices:
            instruction = self._phase.instructions[index][0]
            if instruction.is_attention:
                yield from self._heads
            for name in (self._names[id(parameter)] for parameter in instruction.parameters):
                if name not in names:  # two instructions may read one parameter
                    yield self._of_weight(self._weights[name])
                names.add(name)
            if num_bytes := self._phase.costs[index][1].bytes_sent:
                yield Row(self._phase.works[index][0].name, ["sum"] * WIDTH, f"{scaled(num_bytes, 'B')} a token sent")

    def _of_weight(self, weight: RankWeight) -> Row:
        name = split_name(weight.name)[1].removesuffix(".weight")
        shapes = f"{list(weight.whole_shape)} → {list(weight.shape)}"
        cuts = [partitions.get(weight.name, Partition()) for partitions in self._partitions]
        if cuts[0].cuts_columns:
            shares = [cut.columns for cut in cuts if cut.columns is not None]
            return Row(f"{name} columns", _bar(shares, WIDTH), f"{shapes}: {_ranges(shares)}")
        parts = [list(part) for part in zip(*(cut.rows for cut in cuts), strict=True)]
        if not any(share.size < share.whole for part in parts for share in part):
            return Row(name, ["all"] * WIDTH, f"{list(weight.shape)}")
        shown = parts if len(parts) <= MAX_PARTS else parts[:1]
        whole = sum(part[0].whole for part in shown)
        cells: list[str] = []
        for part in shown:
            cells += [*["gap"] * bool(cells), *_bar(part, max(1, WIDTH * part[0].whole // whole))]
        times = f"each of {len(parts)} parts, " * (len(shown) < len(parts))
        return Row(f"{name} rows", cells, f"{shapes}: {times}{' | '.join(map(_ranges, shown))}")


def _bar(shares: Sequence[Share], width: int) -> list[str]:
    """Return cells along an axis, each with the rank or the ranks that hold the middle of its part."""
    cells = []
    for at in range(width):
        middle = (2 * at + 1) * shares[0].whole // (2 * width)
        ranks = [rank for rank, share in enumerate(shares) if share.start <= middle < share.stop]
        cells.append("all" if len(ranks) == len(shares) else "several" if len(ranks) > 1 else str(ranks[0]))
    return cells


def _ranges(shares: Sequence[Share]) -> str:
    """Return the first and the last item of each share; of shares that several ranks hold, once."""
    distinct = [share for share, _ in groupby(shares)]
    shown = [f"{share.start}-{share.stop - 1}" if share.size > 1 else str(share.start) for share in distinct[:4]]
    return ", ".join(shown) + ", …" * (len(distinct) > 4)


def _heads(config: EngineConfig, tp: int) -> Iterator[Row]:
    """Yield the rows of query heads and KV heads: attention of a head needs no other rank."""
    model = config.model
    spec = next((spec for spec in model.cache_specs if isinstance(spec, PagedKV)), None)
    if spec is None:
        return
    both = [share_heads(model.num_heads, spec.num_kv_heads, LocalGroup(rank, tp)) for rank in range(tp)]
    for name, shares in zip(("query heads", "KV heads"), zip(*both, strict=True), strict=True):
        yield Row(name, _bar(shares, WIDTH), f"{shares[0].whole} → {shares[0].size}: {_ranges(shares)}")
