"""The row of the moved clocks, on a tiny model: the server keeps its promises, and the clocks really move."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak.clocks import DAY_S, missing_compiler, moved_clocks, shifted_clocks
from tests.cli.tiny_directory import make_tiny_directory

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is Linux's")
SHOW = "import sys, time\nfor line in sys.stdin: print(time.time(), time.monotonic(), flush=True)"


@linux
@needs_compiler
def test_clocks_jump_while_a_process_runs() -> None:
    with (
        shifted_clocks() as clocks,
        subprocess.Popen(
            [sys.executable, "-c", SHOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **clocks.environment},
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        def read() -> list[float]:
            print(file=process.stdin, flush=True)
            return [float(word) for word in process.stdout.readline().split()]

        first = read()
        clocks.shift(wall_s=-DAY_S, monotonic_s=600)
        second = read()
        process.stdin.close()
    assert -DAY_S <= second[0] - first[0] < -DAY_S + 60
    assert 600 <= second[1] - first[1] < 660


@linux
@needs_compiler
def test_a_server_bears_clocks_that_jump_and_standing_still(tmp_path: Path) -> None:
    model = make_tiny_directory(tmp_path, max_position_embeddings=2048)
    slow = {"QUIRE_FAULTS": "slow-step:ms=4"}
    row = asyncio.run(moved_clocks(str(model), suspend_s=1, num_tokens=60, environment=slow))
    assert row.passes, row.cells()
