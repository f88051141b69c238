"""Adapters find their places in every model, by a map of the model that is made once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import UnsupportedModelError
from quire.runtime import adapter_layout
from quire.runtime.adapter_layout import AdapterLayout, linear_shapes
from quire.runtime.loader import make_model
from quire.weights.adapter_files import AdapterFiles, LowRankPair
from quire.weights.weight_tensor import WeightTensor
from tests.models.tiny_configs import TINY_CONFIGS, full_config

MODELS = [(model_type, name) for model_type, fields in TINY_CONFIGS.items() for name in fields]


def matrix(name: str, *shape: int) -> WeightTensor:
    return WeightTensor(name, shape, "F32", np.zeros((shape[0], 4 * shape[1]), np.uint8))


def adapter(shapes: dict[str, tuple[int, int]], prefix: str = "") -> AdapterFiles:
    """Return an adapter of rank 2 of these layers."""
    pairs = {
        f"{prefix}{module}.weight": LowRankPair(matrix("a", 2, width), matrix("b", rows, 2), 1.0)
        for module, (rows, width) in shapes.items()
    }
    return AdapterFiles(Path("adapter"), pairs, "digest")


def outcome(layout: AdapterLayout, files: AdapterFiles) -> Any:
    """Return the places of an adapter, or why it has none."""
    try:
        layers = layout.place(files)
    except UnsupportedModelError as error:
        return error.message
    assert layers
    return {
        name: (layer.columns, [(part.stored, part.first_row, part.pair.b.shape) for part in layer.parts])
        for name, layer in layers.items()
    }


@pytest.mark.parametrize(("model_type", "name"), MODELS)
def test_kept_map_gives_the_places_of_a_map_for_the_adapter_s_names(model_type: str, name: str) -> None:
    hf_config = full_config(model_type, TINY_CONFIGS[model_type][name])
    shapes = linear_shapes(hf_config)
    kept, fresh = (AdapterLayout(make_model(hf_config)) for _ in range(2))
    fresh._map = set(), {}
    for chosen in (shapes, dict(list(shapes.items())[::3])):
        assert outcome(kept, adapter(chosen)) == outcome(fresh, adapter(chosen))


def test_map_of_a_model_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = adapter_layout.weight_map

    def counted(model: Any, names: Iterable[str]) -> Any:
        made.append(1)
        return original(model, names)

    hf_config = full_config("qwen2", next(iter(TINY_CONFIGS["qwen2"].values())))
    shapes = linear_shapes(hf_config)
    monkeypatch.setattr(adapter_layout, "weight_map", counted)
    layout = AdapterLayout(make_model(hf_config))
    for count in (len(shapes), 1, 3):
        layout.place(adapter(dict(list(shapes.items())[:count])))
    assert len(made) == 1
