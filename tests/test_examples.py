"""Every example runs as a program and prints what it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
PRINTS = {
    "offline.py": "'The capital of France is' ->",
    "chat.py": "prompt tokens cached]",
    "async_stream.py": "'",
    "step_by_step.py": "step 1: 16 tokens",
}


@pytest.mark.model
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_example_runs(path: Path, smollm2_path: Path) -> None:
    result = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert PRINTS[path.name] in result.stdout
