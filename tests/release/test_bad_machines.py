"""Machines that Quire cannot be compiled for, or runs slowly on: one line says what is missing, and both ways out."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import call
from tests.release.scripts import ROOT, load_script

CHECK_MACHINE = load_script("native/check_machine.py")
HERE: dict[str, Any] = {
    "version": (3, 11, 2), "bits": 64, "system": "Linux", "libc": "glibc", "compilers": (sys.executable,),
    "headers": sysconfig.get_path("include"),
}  # fmt: skip
NEEDED_BY_MAKE = ("sh", "uname", "sed", "grep", "sort", "find", "cmp", "make")


@pytest.fixture
def without_compiler(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has `make` and a Python, but no compiler."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in NEEDED_BY_MAKE:
        (programs / name).symlink_to(str(shutil.which(name)))
    return {"PATH": str(programs), "HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("differs", "missing", "ways"),
    [
        ({"version": (3, 10, 13)}, "Python 3.11 or newer, and this is 3.10", ("make PYTHON=python3.11", "container")),
        ({"bits": 32}, "this one has 32 bits", ("64-bit Linux", "container")),
        ({"libc": ""}, "Alpine has musl", ("with glibc (Debian", "container")),
        ({"system": "Darwin", "libc": ""}, "macOS yet", ("Linux", "container")),
        ({"system": "Windows", "libc": ""}, "on Windows", ("Linux", "container")),
        ({"compilers": ("no-such-compiler",)}, "no C++ compiler", ("apt install g++", "a wheel that `make wheel`")),
        ({"headers": "/nowhere"}, "no headers of Python", ("apt install python3-dev", "a wheel that `make wheel`")),
    ],
    ids=["python-3.10", "32-bit", "musl", "macos", "windows", "no-compiler", "no-headers"],
)
def test_line_names_what_is_missing_and_both_ways_out(
    differs: dict[str, Any], missing: str, ways: tuple[str, str]
) -> None:
    problem = CHECK_MACHINE.problem
    assert problem(**HERE) == ""
    line = problem(**HERE | differs)
    assert missing in line
    assert all(way in line for way in ways)
    assert "\n" not in line


def test_oldest_python_is_the_declared_one() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert declared == ">={}.{}".format(*CHECK_MACHINE.OLDEST_PYTHON)


def test_make_run_without_a_compiler_stops_before_it_sets_anything_up(
    tmp_path: Path, without_compiler: dict[str, str]
) -> None:
    command = ["make", "run", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    made = subprocess.run(command, cwd=ROOT, env=without_compiler, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    said = [line for line in made.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1, made.stderr
    assert "there is no C++ compiler (c++, g++, clang++): apt install g++, or install a wheel" in said[0]
    assert not (tmp_path / "venv").exists()


def test_make_run_with_an_older_python_names_a_newer_one(tmp_path: Path, without_compiler: dict[str, str]) -> None:
    old = tmp_path / "old-python"
    pretend = "import sys; sys.version_info = (3, 10, 13); sys.argv = sys.argv[1:]; import runpy"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'{pretend}; runpy.run_path(sys.argv[0], {{}}, "__main__")\' "$@"\n'
    )
    old.chmod(0o755)
    command = ["make", "run", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}"]
    made = subprocess.run(command, cwd=ROOT, env=without_compiler, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert made.stderr.startswith("Quire needs Python 3.11 or newer, and this is 3.10: ")
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("is_finished", [False, True], ids=["killed-before-pip", "finished"])
def test_environment_is_made_again_unless_it_was_finished(tmp_path: Path, is_finished: bool) -> None:
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)  # it is there before pip
    if is_finished:
        (environment / ".created").touch()
    command = ["make", "--dry-run", "run", f"VENV={environment}", "PYTHON=a-python"]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (f"a-python -m venv {environment}" in planned) == (not is_finished)
    assert f"{environment}/bin/python -m pip install" in planned


def cmake() -> str:
    found = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("needs cmake, which pip fetches to build: pip install cmake")
    return found


@pytest.mark.parametrize("compiler", ["", "no-such-compiler"], ids=["none", "misspelt-CXX"])
def test_build_without_a_compiler_prints_one_line_before_cmakes(
    tmp_path: Path, without_compiler: dict[str, str], compiler: str
) -> None:
    command = [
        cmake(),
        "-S",
        str(ROOT / "native"),
        "-B",
        str(tmp_path / "build"),
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    environment = without_compiler | ({"CXX": compiler} if compiler else {})
    (Path(without_compiler["PATH"]) / "ninja").symlink_to(
        "/bin/true"
    )  # CMake wants to see a build tool before anything else
    built = subprocess.run([*command, "-G", "Ninja"], env=environment, capture_output=True, text=True, check=False)
    assert built.returncode != 0
    line = next(line for line in built.stderr.splitlines() if line)
    assert "there is no C++ compiler" in line
    assert (compiler or "g++") in line
    assert "apt install g++, or install a wheel" in line


def test_missing_kernels_are_one_error_that_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'quire._native'", name="quire._native")

    monkeypatch.setattr("quire.cli.main.importlib.import_module", missing)
    result = call("run", "hi")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"error[installation]: Quire's kernels are not built for Python 3.{sys.version_info[1]}"
    )
    assert "`make run`" in result.stderr
    assert "pip" in result.stderr
    assert len(result.stderr.splitlines()) == 1
