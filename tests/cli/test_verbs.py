"""Verbs of other packages: their tables are read by entry points, and a broken package stops no other verb."""

import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli.main import GROUP, all_verbs
from tests.cli.command_line import call_process

ROOT = Path(__file__).parents[2]
TABLE = """
VERBS = {
    "greet": ("Manners", "greeting", "Say hello."),
    "greet twice": ("Manners", "greeting", "Say hello again."),
    "version": ("Manners", "greeting", "Say something else."),
}
"""
MODULE = """
from quire.cli.command import verb

@verb("greet", ("quire greet",))
def greet_command() -> None:
    \"\"\"Say hello.\"\"\"
    print("hello")

@verb("greet twice", ("quire greet twice",))
def greet_twice_command() -> None:
    \"\"\"Say hello again.\"\"\"
    print("hello, hello")
"""
Quire = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def quire(tmp_path: Path) -> Quire:
    """Return a function that runs `quire` beside a package with these files: its table, and its verbs' module."""

    def run(*arguments: str, table: str = TABLE, module: str = MODULE, **variables: str) -> object:
        (tmp_path / "manners-1.dist-info").mkdir(exist_ok=True)
        points = f"[console_scripts]\nhi = x:y\n\n[{GROUP}]\nmanners = manners:VERBS\n\n[other]\nz = no_such_module:z\n"
        (tmp_path / "manners-1.dist-info" / "entry_points.txt").write_text(points)
        (tmp_path / "manners.py").write_text(table)
        (tmp_path / "greeting.py").write_text(module)
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        return call_process(*arguments, env={**os.environ, "PYTHONPATH": path, **variables})

    return run


def test_tables_of_this_project_are_installed() -> None:
    """An installation that is older than pyproject.toml lacks them: `pip install -e .` again."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    packages = {place.split(".")[0] for place in points.values()}
    assert packages == {"quire_lessons", "quire_workshop"}
    assert {verb.module.split(".")[0] for verb in all_verbs().values()} == {"quire", *packages}


def test_package_brings_verbs_of_one_word_and_of_two(quire: Quire) -> None:
    assert quire("greet").stdout == "hello\n"
    assert quire("greet", "twice").stdout == "hello, hello\n"
    shown = quire("--help")
    assert shown.stdout.endswith("\nManners:\n  greet         Say hello.\n  greet twice   Say hello again.\n")
    assert shown.stderr == ""
    assert quire("greed").stderr.startswith("error[usage]: no such command 'greed' (did you mean 'greet'?)")
    completed = quire(_QUIRE_COMPLETE="bash_complete", COMP_WORDS="quire gr", COMP_CWORD="1")
    assert "plain,greet\n" in completed.stdout


def test_name_that_quire_has_stays_quires(quire: Quire) -> None:
    assert quire("version").stdout.startswith("quire ")
    assert "Say something else" not in quire("--help").stdout


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise OSError('o\\nh')", "OSError: o h"),
        ("verbs = {}", "AttributeError: module 'manners' has no attribute 'VERBS'"),
        ("VERBS = {'greet': 3}", "TypeError: "),
    ],
    ids=["import", "exception", "name", "shape"],
)
def test_table_that_cannot_be_imported_is_one_line_and_the_other_verbs_work(
    quire: Quire, table: str, reason: str
) -> None:
    line = f"the verbs of 'manners' cannot be imported from manners:VERBS: {reason}"
    shown = quire("--help", table=table)
    assert (shown.returncode, shown.stderr.count("\n")) == (0, 1)
    assert shown.stderr.startswith(line)
    assert "  compare " in shown.stdout
    assert "  bench serve " in shown.stdout
    assert quire("learn", table=table).stderr == ""
    assert quire("version", table=table).stderr == ""
    missing = quire("greet", table=table)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert missing.stderr.startswith("error[usage]: no such command 'greet'")
    assert line in missing.stderr


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("verbs = = 1", "invalid syntax"),
        ("", "module 'greeting' has no attribute 'greet_command'"),
    ],
    ids=["import", "syntax", "name"],
)
def test_verb_that_cannot_be_imported_is_one_line_and_the_other_verbs_work(
    quire: Quire, module: str, reason: str
) -> None:
    result = quire("greet", module=module)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"error[installation]: 'greet' cannot be imported from greeting: {reason}")
    assert "  greet " in quire("--help", module=module).stdout
    assert quire("learn", module=module).returncode == 0


def test_missing_kernels_are_no_fault_of_the_package(quire: Quire) -> None:
    result = quire("greet", module="raise ModuleNotFoundError('none', name='quire._native')")
    assert result.stderr.startswith("error[installation]: Quire's kernels are not built for Python")
