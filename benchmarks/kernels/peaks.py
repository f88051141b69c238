"""Peaks of one thread of this machine, measured now: kernels' figures are shares of them."""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peaks:
    """Of one thread, from registers or from memory; 0 where the processor lacks the instruction."""

    fma_gmacs: float
    """fp32 multiply-adds, 10⁹ per second."""
    bf16_gmacs: float
    """VDPBF16PS."""
    int8_gmacs: float
    """VPDPBUSD."""
    read_gbs: float
    """Bytes from memory, 10⁹ per second."""


def measure() -> Peaks:
    """Compile peaks.cpp for this processor and run it, about a second."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peaks"
        source = Path(__file__).with_name("peaks.cpp")
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-std=c++20", "-O2", "-march=native", str(source), "-o", str(program)], check=True)
        result = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return Peaks(**json.loads(result.stdout))


if __name__ == "__main__":
    print(measure())
