from pathlib import Path

import pytest

from quire.engine.tokenizer_source import load_tokenizer, read_chat_template
from quire.errors import ConfigError
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.sources import resolve_source
from tests.cli.tiny_directory import make_tiny_directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(resolve_source(str(make_tiny_directory(tmp_path / "own"))))


def test_own_or_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = make_tiny_directory(tmp_path / "other")
    (other / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    assert load_tokenizer(checkpoint).chat_template != "other"
    for source in (other, other / "tokenizer.json"):
        assert load_tokenizer(checkpoint, str(source)).chat_template == "other"


def test_place_that_is_not_there(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="'nowhere' does not exist"):
        load_tokenizer(checkpoint, "nowhere")


def test_file_that_is_no_tokenizer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = tmp_path / "own" / "model.safetensors"
    with pytest.raises(ConfigError, match=f"'{model}' is no directory: give a directory or its tokenizer.json"):
        load_tokenizer(checkpoint, str(model))


def test_template_that_does_not_parse_is_refused_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("\n{% for %}")
    for value in (str(tmp_path / "bad.jinja"), "\n{% for %}"):
        with pytest.raises(ConfigError, match=r"error in line 2.*correct it, or leave the option out"):
            read_chat_template(value)
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    assert read_chat_template("tool_use") == "tool_use"
    with pytest.raises(ConfigError, match="neither a Jinja template nor a readable file"):
        read_chat_template("missing.jinja")
