"""The bf16 directory holds the weights of the GGUF file, as an independent reader sees them."""

from pathlib import Path

import pytest

from benchmarks.dequantise import dequantised, largest_difference
from tests.cli.tiny_directory import make_tiny_directory


@pytest.mark.model
@pytest.mark.slow
def test_the_weights_are_those_transformers_reads(tmp_path: Path, smollm2_path: Path) -> None:
    pytest.importorskip("transformers")
    directory = dequantised("smollm2", to=tmp_path)
    assert largest_difference(directory, "smollm2") == 0
    modified = (directory / "model.safetensors").stat().st_mtime_ns
    assert dequantised("smollm2", to=tmp_path) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == modified, "made once"


def test_a_directory_stays_what_it_is(tmp_path: Path) -> None:
    directory = make_tiny_directory(tmp_path / "tiny")
    assert dequantised(str(directory)) == directory
