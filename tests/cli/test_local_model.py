"""Checkpoint and tokenizer without an engine."""

from pathlib import Path

import pytest

from quire.cli.local_model import open_model, open_tokenizer
from quire.cli.output import Output
from quire.errors import ConfigError, ModelError
from tests.cli.tiny_directory import make_tiny_directory


def test_tokenizer_of_the_model_or_of_another_place(tmp_path: Path) -> None:
    path = make_tiny_directory(tmp_path / "a")
    other = make_tiny_directory(tmp_path / "b")
    checkpoint = open_model(str(path), None, Output())
    assert checkpoint.format == "safetensors"
    own = open_tokenizer(checkpoint)
    for source in (str(other), str(other / "tokenizer.json")):
        assert open_tokenizer(checkpoint, source).encode("Hi") == own.encode("Hi")
    with pytest.raises(ConfigError, match="nowhere"):
        open_tokenizer(checkpoint, "nowhere")


def test_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        open_model(str(tmp_path / "none.gguf"), None, Output())
