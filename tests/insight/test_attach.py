"""A reader attaches to a running engine: no step imports a module for it."""

import subprocess
import sys
from pathlib import Path

import pytest

from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.insight.trace import EngineTrace
from quire.kernels.instruction import Instruction
from quire.sampling_params import SamplingParams
from tests.cli.tiny_directory import make_tiny_directory

SCRIPT = """
import sys
from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.sampling_params import SamplingParams

engine = LLMEngine.from_options({directory!r}, device="cpu", max_model_len=64, multi_step_decode=1)
for temperature in (0.0, 1.0):
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=temperature, logprobs=2)
    engine.add_request(str(temperature), {{"prompt_token_ids": [1, 2, 3]}}, params)
    recorder = None
    while engine.has_unfinished_requests():
        known = set(sys.modules)
        if recorder is None and engine.scheduler.num_running:
            recorder = Recorder(engine, op_period=1, with_text=True)
        engine.step()
        lines = b"" if recorder is None else recorder.take()
        print(sorted(set(sys.modules) - known), lines.count(b'"kind":"ops"'))
    recorder.close()
"""


def test_no_step_imports_a_module_when_a_reader_attaches(tmp_path: Path) -> None:
    code = SCRIPT.format(directory=str(make_tiny_directory(tmp_path / "tiny")))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    steps = result.stdout.splitlines()
    assert steps == 2 * ["[] 0", *(["[] 1"] * 7)]


def test_no_step_describes_instructions_when_a_reader_attaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step's instructions all but the numbers is known at load: describing them took a third of a step."""
    directory = str(make_tiny_directory(tmp_path / "tiny"))
    engine = LLMEngine.from_options(directory, device="cpu", max_model_len=64, multi_step_decode=1)
    engine.add_request("a", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2, ignore_eos=True))

    def describe(self: Instruction, num_rows: int | str) -> str:
        raise AssertionError("a step waits for a description")

    monkeypatch.setattr(Instruction, "describe", describe)
    recorder = Recorder(engine, op_period=1)
    while engine.has_unfinished_requests():
        engine.step()
    trace = EngineTrace.parse(recorder.take().decode())
    engine.shutdown()
    names = [{op["name"] for op in trace.ops_of(step)} for step in trace.steps]
    assert len(names) == 2
    for rows, found in zip((3, 1), names, strict=True):
        assert any(f"out [{rows}, " in name for name in found)
        assert not any("{" in name for name in found)
