"""Emulated x86 processors from 2008 on: each starts, passes the self-test, and computes the tokens of this machine."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tiny_directory import make_tiny_directory

# Emulation lacks AVX-512: the names Skylake and Ice Lake promise it, and what the processor says counts.
PROCESSORS = ("Nehalem", "Haswell", "EPYC", "Skylake-Server", "Icelake-Server")
EMULATOR = shutil.which("qemu-x86_64")
START = """
import json
from quire import _native
from quire.__main__ import main
sets = [isa for isa in ("scalar", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx") if _native.isa_supported(isa)]
print(json.dumps({"isa": _native.isa(), "sets": sets, "failing": [_native.self_test(isa) for isa in sets]}), flush=True)
main()
"""
"""Quire's command line, behind a line on the instruction sets: an emulated start takes seconds."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates x86-64 on x86-64"),
    pytest.mark.skipif(EMULATOR is None, reason="needs qemu-x86_64: on Debian, apt-get install qemu-user"),
]


def run(*command: str, isa: str = "") -> tuple[str, list[str]]:
    """Return the output of a command, and its warnings."""
    environment = {name: value for name, value in os.environ.items() if name != "QUIRE_ISA"}
    environment |= {"QUIRE_ISA": isa} if isa else {}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout, [line for line in result.stderr.splitlines() if line.startswith("WARNING")]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory: Path = make_tiny_directory(tmp_path_factory.mktemp("model"))
    return ["run", str(directory), "--raw", "--temperature", "0", "--max-tokens", "4", "hi"]


@pytest.fixture(scope="module")
def wanted(words: list[str]) -> str:
    return run(sys.executable, "-m", "quire", *words, isa="scalar")[0]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_older_processor_runs_what_it_has_and_gives_same_tokens(processor: str, words: list[str], wanted: str) -> None:
    printed, warnings = run(str(EMULATOR), "-cpu", processor, sys.executable, "-c", START, *words)
    line, answer = printed.split("\n", 1)
    report = json.loads(line)
    assert report["isa"] in report["sets"]
    assert set(report["sets"]) <= ({"scalar"} if processor == "Nehalem" else {"scalar", "avx2"})
    assert report["failing"] == [""] * len(report["sets"])
    assert answer == wanted
    assert len(warnings) == (processor == "Nehalem")
    for warning in warnings:
        assert "the portable kernels are used, many times slower than those for AVX2" in warning
        assert "choose a small model, or a newer processor" in warning
