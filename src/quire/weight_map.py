"""`weight_map`: for each parameter of a model the stored tensors that it is made of, as data.

A model returns from `layout` what its checkpoints store otherwise than its modules say; a layer says of which parts its
parameters are stacked (`stored_parts`) and how they are laid out (`stored_views`). Loading, ranks, `diff`, `quantize`
and importance matrices read the same map. Must not know files and formats: `WeightTensor.viewed` applies the views.
Next to read: `models/llama.py` for a layout; `runtime/loader.py`, which places the tensors.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quire import nn

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """All rows of a matrix, or elements of a vector, in another order. `order`: the stored position of each."""

    order: "np.ndarray"


@dataclass(frozen=True, slots=True)
class Transpose:
    """The matrix is stored with inputs as rows. `floats_only`: a quantised one is not."""

    floats_only: bool = False


@dataclass(frozen=True, slots=True)
class Offset:
    """The values are stored without this summand."""

    value: float


@dataclass(frozen=True, slots=True)
class Taps:
    """The filters `[channels, 1, taps]` of a convolution become a vector with the first taps of all channels first."""


@dataclass(frozen=True, slots=True)
class Unstack:
    """The matrix `index` of a stack of `count`, or the row of a matrix."""

    index: int
    count: int


View = Rows | Transpose | Offset | Taps | Unstack


@dataclass(frozen=True, slots=True)
class Source:
    """A stored tensor by its name, and the views that make it a parameter, or rows of one."""

    name: str
    views: tuple[View, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The sources of a model's parameters in one checkpoint.

    Fields:
        sources: of each parameter, one below the other; a name that the checkpoint lacks is the model's own.
        unused: the names of stored tensors that the model knows and does not need.
        experts: the names of stored tensors with the experts of a layer, of which a token reads a part.
    """

    sources: Mapping[str, list[Source]]
    unused: frozenset[str]
    experts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and views of a model's stored tensors where they differ from its parameters; `a | b` has those of both.

    Fields:
        prefixes: the first of them that a stored name begins with is left out.
        renames: stored parts of names, of one segment or several, and those of the model.
        views: by a pattern of the model's names.
        unused: patterns of stored names that the model does not need.
        tied: names that may be further ones of parameters, under which checkpoints store them instead or, unless
            `ties_once`, as well.
    """

    prefixes: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, tuple[View, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    ties_once: bool = False

    def __or__(self, other: "Layout") -> "Layout":
        return Layout(
            prefixes=self.prefixes + other.prefixes,
            renames={**self.renames, **other.renames},
            views={**self.views, **other.views},
            unused=self.unused + other.unused,
            tied={**self.tied, **other.tied},
            ties_once=self.ties_once or other.ties_once,
        )

    def own_name(self, name: str) -> str:
        """Return the model's name of a stored tensor."""
        name = name.removeprefix(next(filter(name.startswith, self.prefixes), ""))
        for stored, own in self.renames.items():
            name = f".{name}.".replace(f".{stored}.", f".{own}.")[1:-1]
        return name

    def used_names(self, names: Iterable[str]) -> dict[str, str]:
        """Return the stored names of what the model needs, by its own names."""
        unused = self._unused()
        stored = {self.own_name(name): name for name in names if not unused.search(name)}
        for name, own in self.tied.items():
            if name in stored and own not in stored:
                stored[own] = stored.pop(name)
        return stored

    def is_needless(self, name: str) -> bool:
        """Return whether a stored tensor that no parameter is made of is one that the model knows."""
        is_tie = self.own_name(name) in self.tied and not self.ties_once
        return is_tie or self._unused().search(name) is not None

    def _unused(self) -> re.Pattern[str]:
        return re.compile("|".join(self.unused) or "(?!)")

    def views_of(self, own_name: str) -> tuple[View, ...]:
        """Return the views of a tensor, or of a part of one, in the order of `views`."""
        return tuple(view for pattern, views in self.views.items() if re.search(pattern, own_name) for view in views)


def weight_map(model: Any, names: Iterable[str]) -> WeightMap:
    """Return the sources of a model's parameters in a checkpoint with tensors of these names.

    A parameter is stored under its own name or in its layer's `stored_parts`. A layer with `num_stacked` matrices in
    each parameter stores them as a stack under the parameter's name.
    """
    names, by_id = tuple(names), dict[int, str]()
    named = {name: by_id.setdefault(id(value), name) for name, value in nn.named_parameters(model, repeats=True)}
    layout: Layout = model.layout()
    tied = {name: first for name, first in layout.tied.items() if name not in named}
    layout = replace(layout, tied=tied | {name: first for name, first in named.items() if name != first})
    stored = layout.used_names(names)
    sources, of_experts = dict[str, list[Source]](), set[str]()
    types = nn.parameter_types()
    for path, module in nn.named_modules(model):
        parent, all_parts = path.rpartition(".")[0], getattr(module, "stored_parts", {})
        num_stacked = getattr(module, "num_stacked", 0)
        for attribute, value in nn.attributes(module):
            name = f"{path}.{attribute}" if path else attribute
            if not isinstance(value, types) or named[name] != name:
                continue
            parts = [f"{parent}.{part}" if parent else part for part in all_parts.get(attribute, ())]
            views = [layout.views_of(part) for part in parts]
            common = getattr(module, "stored_views", {}).get(attribute, ())
            if parts and (name not in stored or any(views)):
                found = list(zip(parts, views, strict=True))
            else:
                unstacks, of_each = [Unstack(index, num_stacked) for index in range(num_stacked)], layout.views_of(name)
                found = [(name, (unstack, *of_each)) for unstack in unstacks] or [(name, of_each)]
            sources[name] = [Source(stored.get(own, own), (*own_views, *common)) for own, own_views in found]
            of_experts.update(source.name for source in sources[name] if num_stacked)
    taken = {source.name for found in sources.values() for source in found}
    needless = (name for name in names if name not in taken and layout.is_needless(name))
    return WeightMap(sources, frozenset(needless), frozenset(of_experts))
