"""Adapters beside the base: figures and answers, from a tiny model and random adapters."""

from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.files import read_json_object
from quire.runtime.adapter_layout import linear_shapes, num_parameters
from quire.weights.adapter_files import read_adapter
from quire_lessons.compare import run
from quire_lessons.compare.adapters import write_random_adapter
from quire_lessons.compare.results import RunSettings
from tests.tiny_engine import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def test_comparison_counts_adapters_and_their_bytes(model: Path) -> None:
    comparison = run("adapters", RunSettings(model=str(model), requests=3, rank=2, output_lens=(6,)))
    assert [row[1] for row in comparison.rows] == [0, 1, 3, 1]
    shapes = linear_shapes(read_json_object(model / "config.json"))
    assert [row[5] for row in comparison.rows] == [count * 2 * num_parameters(shapes, 2) for count in (0, 1, 3, 1)]
    assert comparison.outputs_equal == 8  # three of the base, three of one adapter, two more with their own
    assert len(comparison.explanation) == len(comparison.rows)


def test_random_adapter_has_all_layers_and_its_parameters(model: Path, tmp_path: Path) -> None:
    config = read_json_object(model / "config.json")
    shapes = linear_shapes(config)
    pairs = read_adapter(write_random_adapter(tmp_path / "one", shapes, 3, seed=1), config).pairs
    assert {name.removesuffix(".weight") for name in pairs} == set(shapes)
    assert sum(pair.a.to_numpy().size + pair.b.to_numpy().size for pair in pairs.values()) == num_parameters(shapes, 3)
    other = read_adapter(write_random_adapter(tmp_path / "two", shapes, 3, seed=2), config).pairs
    name = next(iter(pairs))
    assert not np.array_equal(pairs[name].a.to_numpy(), other[name].a.to_numpy())


@pytest.mark.parametrize(
    ("settings", "named"),
    [(RunSettings(model="fake"), "fake"), (RunSettings(output_lens=(1,)), "2 or more"),
     (RunSettings(prompt_lens=(1, 2)), "one prompt length")],
)  # fmt: skip
def test_settings_that_measure_nothing_are_refused(settings: RunSettings, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run("adapters", settings)


def test_rank_outside_what_is_computed_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank=257"):
        RunSettings(rank=257)
