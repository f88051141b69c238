"""Runs the commands and Python blocks of a Markdown page and compares their output with the output shown there.

`python -m tests.guards.shown_commands PAGE…` writes the output into the pages and their translations, and the figures.

- A block fenced as `console` has commands after `$ `, each followed by what it prints on stdout.
- A block fenced as `python` runs in the scope of its page; a `text` block right behind it is what it prints.
- The word `measured` after either name: numbers depend on the machine and the run, so all else is compared.
- A line `...` in an output stands for any lines.

A page runs in an empty folder. Files under `figures/` are the page's figures. A test runs measured commands briefly:
their numbers, which are not compared, come from less work.
"""

import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quire import _native
from quire.cli.main import cli
from quire_lessons.compare import adapters, speculation

FENCE = re.compile(r"^```(\w+)( measured)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FIGURES = "figures"
TIME_UNITS = re.compile(r"# ?(?:ns|µs|ms|s)\b")
PREFIXES = re.compile(r"# [kMGT](?=FLOP|B/s)")
BRIEF_OPTIONS = {
    "bench": ("--repetitions", "1", "--no-warm-up"),
    "compare adapters": ("--prompt-len", "8", "--output-len", "8"),
    "compare cache": ("--output-len", "16"),
    "compare speculation": ("--output-len", "12"),
    "explain": ("--ctx", "16"),
}
"""Beginning of a measured command → options behind its own when it runs briefly: the last of two values counts."""


@dataclass
class Shown:
    """A command or a Python block of a page, and the span of its output in the page's text."""

    source: str
    is_python: bool
    is_measured: bool
    output: str
    start: int
    end: int

    def equals(self, printed: str) -> bool:
        """True if `printed` is the output, with `...` lines for any lines and, if measured, any numbers."""
        shown, lines = (_plain_lines(text, self.is_measured) for text in (self.output, printed))
        pattern = "".join(r"(?:.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in shown)
        return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def _plain_lines(text: str, is_measured: bool) -> list[str]:
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    if is_measured:
        lines = [re.sub(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", "#", line) for line in lines]
        lines = [re.sub(r"\s+", " ", PREFIXES.sub("# ", TIME_UNITS.sub("# t", line))) for line in lines]
    return lines


@dataclass
class Page:
    """A page that can run. `scope`: the names that its Python blocks define."""

    path: Path
    text: str
    scope: dict[str, Any] = field(default_factory=lambda: {"__name__": "__docs__"})

    @classmethod
    def read(cls, path: Path) -> "Page":
        """Read a page."""
        return cls(path, path.read_text())

    def shown(self) -> list[Shown]:
        """Return the commands and the Python blocks in order."""
        found: list[Shown] = []
        for fence in FENCE.finditer(self.text):
            language, is_measured, body = fence[1], fence[2] is not None, fence[3]
            if language == "console":
                found += _commands(body, fence.start(3), is_measured)
            elif language == "python":
                found.append(Shown(body, True, False, "", -1, -1))
            elif language == "text" and found and found[-1].is_python and self._is_behind(fence.start()):
                found[-1] = Shown(found[-1].source, True, is_measured, body, *fence.span(3))
        return found

    def blocks(self) -> list[str]:
        """Return every fenced block, fences included: a translation has the same ones."""
        return BLOCK.findall(self.text)

    def figures(self) -> list[str]:
        """Return the names of the figures that the page shows."""
        return re.findall(rf"!\[[^\]]*\]\((?:\.\./)?{FIGURES}/([^)]+)\)", self.text)

    def outline(self) -> list[str]:
        """Return the marks of headings, and the tags of folded answers, in order."""
        return re.findall(r"^#+ |^</?details>", self.text, re.MULTILINE)

    def run(self, shown: Shown, *, brief: bool = False) -> str:
        """Run a command or block in the current folder. Returns: stdout. Raises: AssertionError if it fails.

        `brief`: a measured command may do less than its options say.
        """
        if not shown.is_python:
            return run_command(shown.source, brief=brief and shown.is_measured)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(shown.source, self.path.name, "exec"), self.scope)
        return printed.getvalue()

    def _is_behind(self, start: int) -> bool:
        return self.text[:start].rstrip().endswith("```")


def _commands(body: str, offset: int, is_measured: bool) -> list[Shown]:
    found: list[Shown] = []
    for line in body.splitlines(keepends=True):
        start, offset = offset, offset + len(line)
        if line.startswith("$ "):
            found.append(Shown(line[2:].strip(), False, is_measured, "", offset, offset))
        elif found:
            found[-1].output += line
            found[-1].end = offset
        else:
            raise AssertionError(f"output without a command: {line!r} at {start}")
    return found


def run_command(line: str, *, brief: bool = False) -> str:
    """Run a command line. `quire …` runs in this process, which has torch loaded, and may be piped to a command.

    `brief`: add the options of `BRIEF_OPTIONS`, and measure fewer rounds, and drafts on short texts.
    """
    command, _, rest = line.partition(" | ")
    if not command.startswith("quire "):
        return _shell(line, "")
    words = shlex.split(command)[1:]
    with pytest.MonkeyPatch.context() as patch:
        if brief:
            added = [more for verb, more in BRIEF_OPTIONS.items() if f"{command} ".startswith(f"quire {verb} ")]
            words += itertools.chain.from_iterable(added)
            patch.setattr(adapters, "NUM_ROUNDS", 1)
            patch.setattr(speculation, "NUM_ROUNDS", 1)
            patch.setattr(speculation, "EDIT_CHARACTERS", 800)
            patch.setattr(speculation, "SUMMARY_CHARACTERS", 800)
        result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, f"{command}: {result.stderr or result.exception!r}"
    return _shell(rest, result.stdout) if rest else result.stdout


def _shell(line: str, stdin: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings: dict[str, Any] = {"env": {**os.environ, "PATH": path}, "text": True, "timeout": 120}
    run = subprocess.run(["bash", "-c", line], input=stdin, capture_output=True, check=False, **settings)
    assert run.returncode == 0, f"{line}: {run.stderr}"
    return run.stdout


@dataclass(frozen=True)
class Figure:
    """A file that a page has drawn. `is_measured`: it has numbers that differ from run to run."""

    data: bytes
    is_measured: bool


@contextlib.contextmanager
def without_tiles() -> Iterator[None]:
    """Use the kernels that machines without AMX have, on which each request has the same bits in any batch."""
    before = _native.isa()
    if not _native.has_tiles():
        yield
        return
    _native.set_isa("avx512")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUIRE_ISA", "avx512")
            yield
    finally:
        _native.set_isa(before)


def run_page(page: Page, *, brief: bool = False) -> tuple[list[tuple[Shown, str]], dict[str, Figure]]:
    """Run a page in an empty folder. Returns: what each command and block printed, and the figures by name."""
    printed, figures = [], dict[str, Figure]()
    with (
        without_tiles(),
        tempfile.TemporaryDirectory() as name,
        contextlib.chdir(name),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_STATE_HOME", name)  # exercises that are done there are not the developer's
        patch.setenv("LC_ALL", "C.UTF-8")  # commands speak English
        Path(FIGURES).mkdir()
        for shown in page.shown():
            printed.append((shown, page.run(shown, brief=brief)))
            for file in Path(FIGURES).iterdir():
                figures.setdefault(file.name, Figure(file.read_bytes(), shown.is_measured))
    return printed, figures


def write(path: Path) -> None:
    """Write what differs into a page, its translation, and the figures beside it.

    Tables and figures of a page come from one run: if a measured one is new, all measured ones are written.
    """
    page = Page.read(path)
    printed, figures = run_page(page)
    kept = path.parent / FIGURES
    kept.mkdir(exist_ok=True)
    is_new = any(figure.is_measured and not (kept / name).exists() for name, figure in figures.items())
    is_new |= any(shown.is_measured and shown.start >= 0 and not shown.equals(output) for shown, output in printed)
    for name, figure in figures.items():
        if is_new or not figure.is_measured:
            (kept / name).write_bytes(figure.data)
    text = page.text
    for shown, output in reversed(printed):
        if shown.start >= 0 and (not shown.equals(output) or (is_new and shown.is_measured)):
            output = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
            text = text[: shown.start] + (output + "\n" if output else "") + text[shown.end :]
            print(f"{path.name}: {shown.source.splitlines()[0]}")
    path.write_text(text)
    translation, blocks = path.parent / "zh" / path.name, Page(path, text).blocks()
    if translation.exists() and len(blocks) == len(Page.read(translation).blocks()):
        given = iter(blocks)
        translation.write_text(BLOCK.sub(lambda _: next(given), translation.read_text()))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write(Path(argument).resolve())
