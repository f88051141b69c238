"""A batch's own server: it answers, it says why it cannot start, and it goes with its parent."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from quire.cli.batch_server import own_server
from quire.config import EngineOptions
from quire.errors import ModelNotFoundError
from tests.cli.tiny_directory import make_tiny_directory

PARENT = """
import sys, time
from quire.cli.batch_server import own_server
from quire.config import EngineOptions
if __name__ == "__main__":
    with own_server(EngineOptions(model=sys.argv[1])) as url:
        print(url, flush=True)
        time.sleep(60)
"""


def test_it_serves_and_ends(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with own_server(EngineOptions(model=str(make_tiny_directory(tmp_path / "model")))) as url:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=60) as response:
            assert response.status == 200
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        assert started
    _, alive = psutil.wait_procs([child for child in started if "resource_tracker" not in _command(child)], 20)
    assert alive == []


def test_why_it_cannot_start() -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"), own_server(EngineOptions(model="nowhere")):
        pass


def test_it_goes_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    model = make_tiny_directory(tmp_path / "model")
    process = subprocess.Popen([sys.executable, script, model], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert url.startswith("http://127.0.0.1:")
    _, alive = psutil.wait_procs(children, 20)
    assert alive == []


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        time.sleep(0)
        return ""
