"""Opening an engine, one request through it, its statistics line, and the parameters' precedence."""

import pytest

from quire.cli.run import (
    DEFAULT_MAX_TOKENS,
    generate,
    open_engine,
    sampling_params_for,
)
from quire.cli.terminal import Output
from quire.config import EngineOptions
from quire.engine.llm_engine import LLMEngine
from quire.errors import EngineDeadError, EngineError, InvalidParameterError
from quire.sampling_params import SamplingParams
from tests.cli.command_line import FakeEngine
from tests.engine.builders import make_engine


def test_dead_engine_raises_its_error() -> None:
    engine = FakeEngine(EngineOptions())
    engine.on_step = lambda: engine.abort_request(["cli-0"])
    engine.dead_error = EngineDeadError("the engine stopped")
    with pytest.raises(EngineDeadError):
        generate(engine, {"prompt": "Hi"}, SamplingParams())


def test_failed_answer_raises_its_error() -> None:
    engine, executor = make_engine()
    executor.errors["cli-0"] = "no token can be chosen"
    with pytest.raises(EngineError, match="no token can be chosen"):
        generate(engine, {"prompt": "Hi"}, SamplingParams())


def test_flags_win_over_the_models_defaults() -> None:
    engine = FakeEngine(EngineOptions())
    assert sampling_params_for(engine, {}) == SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 40}
    engine.config.model.generation_defaults.update(defaults)
    params = sampling_params_for(engine, {"top_p": 0.5})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.5, 40)
    assert sampling_params_for(engine, {"min_tokens": 100}).max_tokens == 100
    with pytest.raises(InvalidParameterError):
        sampling_params_for(engine, {"top_p": 7})


def test_open_engine_describes_it_and_always_shuts_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.cli.run.resolve_source", lambda name, **settings: None)
    engine = FakeEngine(EngineOptions())
    monkeypatch.setattr(LLMEngine, "build", lambda options, progress: engine)
    output = Output()
    output.verbosity = 1
    with pytest.raises(ZeroDivisionError), open_engine(EngineOptions(), output):
        raise ZeroDivisionError
    assert engine.was_shut_down
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        "smollm2 · ScriptedModel · float32 · cpu · 1 thread · in-process · batch_invariant off · 512 KiB of KV cache"
        in captured.err
    )
    assert "weights: 250 ms" in captured.err
    assert "block_size = 4: a CPU reads long runs" in captured.err
