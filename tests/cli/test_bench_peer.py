"""Transformers as a peer: it runs on the same files, and its absence is explained."""

import importlib.util
from pathlib import Path

import pytest

from quire.cli.bench_cases import BenchCase
from quire.cli.bench_peer import TransformersSide
from quire.errors import ConfigError
from quire.weights.sources import resolve_source
from tests.cli.tiny_directory import make_tiny_directory


@pytest.mark.slow
def test_transformers_measures_prompts_and_generation(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    files = resolve_source(str(make_tiny_directory(tmp_path / "tiny")))
    side = TransformersSide(files, dtype="float32", device="cpu")
    assert side.measure(BenchCase(8, 0), [[1] * 8]) > 0
    assert side.measure(BenchCase(1, 5, 3), [[1], [2], [3]]) > 0


def test_missing_transformers_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve_source(str(make_tiny_directory(tmp_path / "tiny")))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        TransformersSide(files, dtype="float32", device="cpu")
