"""`quire tour` beside a GPU: times, tokens/s, the speed-up and PyTorch's memory, from a model with random weights."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from quire.cli.main import cli
from tests.cli.tiny_directory import make_tiny_directory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_tour_runs_the_prompt_on_the_gpu_too_and_shows_speed_and_memory(tmp_path: Path) -> None:
    directory = make_tiny_directory(tmp_path / "tiny")
    arguments = ["--json", "tour", str(directory), "--prompt-len", "24", "--max-tokens", "4", "--dtype", "float32"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.stderr
    stop = json.loads(result.stdout)["stops"][-1]
    assert stop["title"] == f"The same prompt on {torch.cuda.get_device_name()}"
    shown = "\n".join(stop["lines"])
    for part in ("tokens/s", "speed-up: prefill", " allocated, ", " reserved by PyTorch"):
        assert part in shown
    assert set(stop["facts"]) == {"cpu", torch.cuda.get_device_name()}
