"""A reader attaches to a running engine: no step imports a module for it."""

import subprocess
import sys
from pathlib import Path

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
