"""Kernels under AddressSanitizer (A10): every read and write of their tests is within what was allocated.

The extension is compiled with it for each instruction set of this machine, into `build/asan`, and loaded in the place
of the usual one. Next to read: `tests/kernels/native/test_bounds.py`, the same for ends of memory without it.
"""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.soak.row import Row

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "asan"
BUILD_S, TEST_S = 3 * 3600, 3 * 3600
RUN_TESTS = """
import importlib.util, sys
import quire
spec = importlib.util.spec_from_file_location("quire._native", sys.argv[1])
sys.modules[spec.name] = quire._native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quire._native)
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


async def kernels() -> Row:
    """A10: build, and run the tests of the kernels."""
    row = Row("A10", "tests of the kernels under AddressSanitizer")
    extension = await asyncio.to_thread(_build)
    # The second, whose exceptions the first one watches, would come too late with the extension.
    names = ("libasan.so", "libstdc++.so")
    libraries = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    for old in BUILD.glob("report.*"):
        old.unlink()
    # Python leaks at its end; pytest would keep what is written to stderr before an abort.
    options = f"detect_leaks=0:log_path={BUILD / 'report'}"
    environment = {**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": options}
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", RUN_TESTS, str(extension), "-q", "-p", "no:cacheprovider",
                         "tests/kernels"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_S, check=False,
    )  # fmt: skip
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", run.stdout)}
    row.check("passed", counts.get("passed", 0), passes=counts.get("passed", 0) > 0)
    row.check("failed", counts.get("failed", 0) + counts.get("error", 0), passes=run.returncode == 0)
    for report in BUILD.glob("report.*"):
        found = re.search(r"AddressSanitizer: (\S+)[^\n]*\n([^\n]*)", report.read_text())
        row.check("found:", " ".join(found.groups()) if found else report.name, passes=False)
    return row


def _build() -> Path:
    """Compile the extension. Returns: its file. Raises: RuntimeError with the compiler's last lines."""
    settings = ("cmake.define.QUIRE_RELEASE=OFF", "cmake.define.QUIRE_ISAS=runnable", f"build-dir={BUILD / 'cmake'}")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target",
         str(BUILD / "site"), *(f"--config-settings={setting}" for setting in settings), str(ROOT)],
        env={**os.environ, "CXXFLAGS": "-fsanitize=address -fno-omit-frame-pointer", "LDFLAGS": "-fsanitize=address"},
        capture_output=True, text=True, timeout=BUILD_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the sanitised build failed: {done.stderr[-300:]}")
    return max((BUILD / "site" / "quire").glob("_native*.so"), key=lambda path: path.stat().st_mtime)
