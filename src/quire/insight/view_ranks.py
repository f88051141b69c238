"""`view_ranks`: one layer cut over the ranks of a tensor-parallel group, from the partitions of the model's own layers.

Next to read: `../layers/group.py` for shares, `explain/rank_model.py`, `picture.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from quire.cache_spec import PagedKV
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.insight.explain.explanation import explain
from quire.insight.explain.phases import Phase
from quire.insight.explain.rank_model import RankWeight, rank_partitions
from quire.insight.explain.report import format_value, scaled
from quire.insight.explain.settings import Settings
from quire.insight.picture import COLOURS, Kind, Picture, Row
from quire.kernels.instruction import StepShape
from quire.layers.group import LocalGroup, Partition, Share, share_heads
from quire.runtime.plan.lower import layers_of, split_name
from quire.weights.checkpoint import Checkpoint

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
