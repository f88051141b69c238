"""Kernels compiled for cards that need not be here: no spills, enough shared memory, tensor cores for prompts."""

import json
import os
import subprocess
import sys

import pytest

SHARED_KB = {80: 163, 90: 227, 100: 227, 120: 99}
MAX_SPILLED = 32
"""Bytes of a thread. Sines and cosines of large angles take 32 of the stack."""


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(SHARED_KB))
def test_kernels_fit_a_card(arch: int) -> None:
    # Kernels that this process has imported are interpreted.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.triton.compiled", str(arch)]
    if arch >= 90:
        command.append("--pdl")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {"attend prompts", "attend decodes", "linear_row", "write_kv"} <= {row["kernel"] for row in rows}
    assert [row for row in rows if row["spilled_bytes"] > MAX_SPILLED] == []
    assert [row for row in rows if row["shared_bytes"] > SHARED_KB[arch] * 1024] == []
    if arch == 90:  # heads of 512 values have tiles that are too small for it
        prompts = [row for row in rows if row["kernel"] == "attend prompts" and row["model"] != "Gemma 4"]
        assert [row for row in prompts if not row["wgmma"]] == []
    if arch >= 90:
        assert any(row["waits"] for row in rows)
