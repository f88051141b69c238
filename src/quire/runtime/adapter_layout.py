"""`AdapterLayout`: for each linear layer the matrices of an adapter, and the outputs that each of them changes.

A layer that stacks stored tensors gets the matrices of each at its rows, by the model's `weight_map`; of a sliced layer
a rank gets the rows of B or the columns of A that are its share. Next to read: `adapter_pool.py`.
"""

import bisect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import nn
from quire.errors import ModelFileError, UnsupportedModelError, nearest, printable
from quire.kernels.lora import MAX_PARTS
from quire.layers.group import Partition
from quire.layers.linear import Linear
from quire.lazy_torch import on_meta
from quire.runtime.loader import make_model, partitions_of
from quire.weight_map import Rows, Transpose, weight_map
from quire.weights.adapter_files import AdapterFiles, LowRankPair


def linear_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of every stored linear layer that adapters may change, by the name of its module.

    Those of a layer that stacks stored tensors of several parts are left out: the model does not say their sizes.
    """
    with on_meta():
        model = make_model(hf_config)
    sources, shapes = weight_map(model, ()).sources, {}
    for path, module in nn.named_modules(model):
        if not isinstance(module, Linear) or path.rpartition(".")[2] == "lm_head":
            continue
        stored = sources[f"{path}.weight"]
        num_outputs, num_inputs = module.weight.shape
        # A layer that stacks stored tensors says how many outputs each of them has.
        parts = getattr(module, "partitions", {}).get("weight") if len(stored) > 1 else None
        sizes = [num_outputs] if parts is None else [part.whole for part in parts.rows]
        for source, size in zip(stored, sizes, strict=True) if len(stored) == len(sizes) else ():
            shapes[source.name.removesuffix(".weight")] = size, num_inputs
    return shapes


def num_parameters(shapes: Mapping[str, tuple[int, int]], rank: int) -> int:
    """Return the values of an adapter's matrices: R (N + I) for each layer."""
    return sum(rank * (num_outputs + num_inputs) for num_outputs, num_inputs in shapes.values())


@dataclass(frozen=True, slots=True, eq=False)
class LayerPart:
    """Rows of a layer's weight that a pair changes: those of B from `stored`, to `first_row` on."""

    pair: LowRankPair
    stored: range
    first_row: int

    def b(self) -> NDArray[np.float32]:
        """Return the scaled rows of B. Shapes: [rows, R]."""
        values = self.pair.b.to_numpy().reshape(self.pair.b.shape)
        order = self.pair.row_order
        rows = values[self.stored.start : self.stored.stop] if order is None else values[order[self.stored]]
        return rows if self.pair.scale == 1 else rows * np.float32(self.pair.scale)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedLayer:
    """The parts of a layer. `columns`: the inputs that this rank multiplies."""

    parts: tuple[LayerPart, ...]
    columns: slice


class AdapterLayout:
    """The places of adapters in one model, which has shapes alone.

    The model's map is made for the weights' own names; an adapter that names others gets one for its own, which is kept
    for the next. May be used by several threads.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules, self._partitions = dict(nn.named_modules(model)), partitions_of(model)
        self._parameters = dict(nn.named_parameters(model))
        sources = weight_map(model, ()).sources
        self._map = {source.name for found in sources.values() for source in found}, sources

    def place(self, files: AdapterFiles) -> dict[str, PlacedLayer]:
        """Return the layers that an adapter changes, by the names of their weights.

        Raises: ModelFileError for a module that the model has not, or of another shape; UnsupportedModelError for one
        that is no linear layer, by name.
        """
        names, found_map = self._map
        if not files.pairs.keys() <= names:
            found_map = weight_map(self._model, files.pairs).sources
            self._map = set(files.pairs), found_map
        left, layers = set(files.pairs), {}
        for name, sources in found_map.items():
            changed = [source.name for source in sources if source.name in files.pairs]
            if not changed:
                continue
            left.difference_update(changed)
            path = name.rpartition(".")[0]
            if not isinstance(self._modules.get(path), Linear) or path.rpartition(".")[2] == "lm_head":
                raise UnsupportedModelError(
                    f"{files.path}: {changed[0].removesuffix('.weight')} is no linear layer between embeddings and "
                    "head, and adapters of experts, embeddings and heads are not computed: train without it"
                )
            partition = self._partitions.get(name, Partition())
            layers[name] = _place(files, name, sources, self._parameters[name], partition)
        if left:
            wrong = printable(min(left).removesuffix(".weight"))
            known = [source.name.removesuffix(".weight") for sources in found_map.values() for source in sources]
            raise ModelFileError(
                f"{files.path}: the model has no module {wrong}{nearest(wrong, known)}: the adapter is of another"
                " base model"
            )
        return layers


def _place(files: AdapterFiles, name: str, sources: list[Any], parameter: Any, partition: Partition) -> PlacedLayer:
    shape = partition.whole_shape(tuple(parameter.shape))
    pairs: list[LowRankPair | None] = []
    for source in sources:
        pair = files.pairs.get(source.name)
        orders = [view.order for view in source.views if isinstance(view, Rows)]
        if pair is not None and orders:
            pair = LowRankPair(pair.a, pair.b, pair.scale, orders[0])
        if any(not isinstance(view, Rows | Transpose) for view in source.views) or len(orders) > 1:
            raise UnsupportedModelError(f"{files.path}: adapters of {source.name} are not computed: train without it")
        pairs.append(pair)
    sizes = _sizes(files, name, sources, pairs, partition, shape)
    for source, pair, size in zip(sources, pairs, sizes, strict=True):
        if pair is not None and (pair.b.shape[0], pair.a.shape[1]) != (size, shape[1]):
            raise ModelFileError(
                f"{files.path}: {source.name.removesuffix('.weight')} has A {list(pair.a.shape)} and B "
                f"{list(pair.b.shape)}, but the model's weight is [{size}, {shape[1]}]: the adapter is of another base "
                "model"
            )
    parts, first_row = [], 0
    tops = [0, *itertools.accumulate(sizes)]
    for rows in partition.row_ranges(tops[-1]):
        for index in range(bisect.bisect(tops, rows.start) - 1, bisect.bisect_left(tops, rows.stop)):
            top, pair = tops[index], pairs[index]
            stored = range(max(rows.start - top, 0), min(rows.stop - top, sizes[index]))
            if pair is not None and stored:
                parts.append(LayerPart(pair, stored, first_row))
            first_row += len(stored)
    if len(parts) > MAX_PARTS:
        raise UnsupportedModelError(f"{files.path}: {name} has {len(parts)} parts, at most {MAX_PARTS} are computed")
    return PlacedLayer(tuple(parts), partition.column_slice)


def _sizes(
    files: AdapterFiles,
    name: str,
    sources: list[Any],
    pairs: list[LowRankPair | None],
    partition: Partition,
    shape: tuple[int, ...],
) -> list[int]:
    """Return the rows of each stored tensor: those of the layer's parts, else as the adapter has them."""
    if len(sources) == 1:
        return [shape[0]]
    if len(partition.rows) == len(sources):
        return [part.whole for part in partition.rows]
    known = [None if pair is None else pair.b.shape[0] for pair in pairs]
    if known.count(None) == 1:
        known[known.index(None)] = shape[0] - sum(size for size in known if size is not None)
    if None in known or sum(size for size in known if size) != shape[0]:
        raise UnsupportedModelError(f"{files.path}: the parts of {name} are not known: train all of them, or none")
    return [size for size in known if size is not None]
