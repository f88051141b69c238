"""The kernels for ARM64 on emulated processors: each has the sets it should, and all give this processor's bits.

`make test-arm` compiles them. It needs `aarch64-linux-gnu-g++` and `qemu-aarch64`; emulation says nothing of speed.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from quire import _native

PROGRAM = Path(__file__).parents[2] / "build" / "aarch64" / "print_digests"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
SETS = {
    "cortex-a53": ["scalar"],  # Armv8.0
    "cortex-a76": ["neon", "scalar"],  # Armv8.2: the Raspberry Pi 5
    "neoverse-n1": ["neon", "scalar"],  # Graviton 2
    "neoverse-v1": ["neon_i8mm", "neon", "scalar"],  # Graviton 3
    "max": ["neon_i8mm", "neon", "scalar"],
}

pytestmark = pytest.mark.skipif(not (EMULATOR and PROGRAM.exists()), reason="`make test-arm` builds and runs this")


@pytest.mark.parametrize("processor", SETS)
def test_emulated_processor_runs_its_sets_with_the_bits_of_this_one(processor: str) -> None:
    known = subprocess.run([str(EMULATOR), "-cpu", "help"], capture_output=True, text=True, check=True).stdout.split()
    if processor not in known:
        pytest.skip(f"this QEMU does not know {processor}")
    command = [str(EMULATOR), "-cpu", processor, str(PROGRAM)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[tuple[str, str]]] = {}
    for line in output.splitlines():
        isa, name, result = line.split("\t")
        found.setdefault(isa, []).append((name, result))
    assert list(found) == SETS[processor]
    wanted = [("self-test", ""), *((name, f"{digest:016x}") for name, digest in _native.result_digests("scalar"))]
    assert all(results == wanted for results in found.values()), found
