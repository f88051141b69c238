from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.engine.llm_engine import LLMEngine
from quire.engine.tokenizer_source import load_tokenizer, read_chat_template
from quire.errors import ConfigError, ModelError, PromptError
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.sources import resolve_source
from tests.cli.tiny_directory import make_tiny_directory


@contextmanager
def closing(engine: LLMEngine) -> Iterator[LLMEngine]:
    try:
        yield engine
    finally:
        engine.shutdown()


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


def test_shape_without_weights_needs_no_tokenizer_for_token_ids(tmp_path: Path) -> None:
    shape = make_tiny_directory(tmp_path / "shape")
    (shape / "model.safetensors").unlink()
    options: dict[str, Any] = {"model": str(shape), "load_format": "dummy", "device": "cpu", "max_model_len": 32}
    with closing(LLMEngine.from_options(**options)) as engine:
        assert engine.tokenizer is not None, "the one of the directory"
    (shape / "tokenizer.json").unlink()
    with closing(LLMEngine.from_options(**options)) as engine:
        engine.add_request("a", {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=3, ignore_eos=True))
        outputs = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()]
        assert len(outputs[-1].outputs[0].token_ids) == 3
        with pytest.raises(PromptError, match=r"no tokenizer: give the prompt as token ids.*tokenizer=DIR"):
            engine.add_request("b", {"prompt": "text"})
    (shape / "tokenizer.model").touch()  # a tokenizer of another form is an error, not none
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLMEngine.from_options(**options)


def test_template_that_does_not_parse_is_refused_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("\n{% for %}")
    for value in (str(tmp_path / "bad.jinja"), "\n{% for %}"):
        with pytest.raises(ConfigError, match=r"error in line 2.*correct it, or leave the option out"):
            read_chat_template(value)
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    assert read_chat_template("tool_use") == "tool_use"
    with pytest.raises(ConfigError, match="neither a Jinja template nor a readable file"):
        read_chat_template("missing.jinja")
