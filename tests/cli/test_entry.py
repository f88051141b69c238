"""Ctrl-C before the command line is there."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def interrupted_while_importing(tmp_path: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m quire`, to which a Ctrl-C comes when `module` is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [*arguments, sys.executable, "-m", "quire", "version"], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_an_early_interrupt_is_quiet(tmp_path: Path) -> None:
    for module in ("quire.cli.main", "click", "quire.cli.output"):
        result = interrupted_while_importing(tmp_path, module)
        assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", ""), module


def test_an_interrupt_while_a_verb_is_imported_is_quiet(tmp_path: Path) -> None:
    result = interrupted_while_importing(tmp_path, "quire.cli.version")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_an_interrupt_that_the_shell_ignores_stays_ignored(tmp_path: Path) -> None:
    result = interrupted_while_importing(tmp_path, "click", "sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("quire ")


def test_the_package_alone_imports_nothing_that_takes_long() -> None:
    source = str(Path(__file__).parents[2] / "src")
    script = f"import sys; sys.path.insert(0, {source!r}); import quire; print(sorted(sys.modules))"
    # Without `site`, which imports what it likes.
    command = [sys.executable, "-S", "-E", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "'quire'" in result.stdout
    assert "'typing'" not in result.stdout
    assert "'quire.errors'" not in result.stdout
