"""Every example runs as a program and prints what it promises."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
PRINTS = {
    "offline.py": "'The capital of France is' ->",
    "chat.py": "prompt tokens cached]",
    "async_stream.py": "'",
    "step_by_step.py": "step 1: 16 tokens",
    "linear_attention.py": "5.55 MB per request",
}


@pytest.mark.model
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_example_runs(path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert PRINTS[path.name] in capsys.readouterr().out
