"""Output of a verb: results to stdout, notes and errors to stderr.

One `Output` per command line, kept in `ctx.obj` of the root context. Names, templates and answers come from files,
models and servers: their control characters are escaped. It must not know any verb; it does not import click's
terminal code, so that `--help` stays instant.
Next to read: `progress.py`.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from quire.cli.word_wrap import WordWrap
from quire.errors import CONTROL, ConfigError, escaped
from quire.text.width import display_width

if TYPE_CHECKING:
    import logging

COLOR_CHOICES = ("auto", "always", "never")
_STYLES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}


class Output:
    """Results, notes and styles, under `--json`, `-q`, `-v` and `--color`.

    `verbosity`: -1 with `-q`, 0, 1 with `-v`, 2 with `-vv`. `logger`: where notes and the error go instead of stderr,
    for a verb whose stderr is a log that programs read.
    """

    def __init__(self) -> None:
        self.json = False
        self.verbosity = 0
        self.color = "auto"
        self.logger: logging.Logger | None = None

    def wants_color(self, stream: TextIO) -> bool:
        """Return whether escape sequences may be written to `stream`.

        `--color` decides first, then `NO_COLOR`, `FORCE_COLOR`, then whether it is a capable terminal.
        """
        if self.color != "auto":
            return self.color == "always"
        if os.environ.get("NO_COLOR"):
            return False
        if os.environ.get("FORCE_COLOR"):
            return True
        return is_capable_terminal(stream)

    def style(self, text: str, name: str, stream: TextIO) -> str:
        """Return `text` in a style ("dim", "bold", "red", …) where `stream` takes colour, else unchanged."""
        return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if self.wants_color(stream) else text

    def result(self, text: str = "", *, style: str = "") -> None:
        """Write a line of the result to stdout, at once."""
        shown = escaped(text, keeps_lines=True)
        self.stream((self.style(shown, style, sys.stdout) if style else shown) + "\n")

    def stream(self, text: str) -> None:
        """Write a piece of the result to stdout as it is, at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    @contextlib.contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        """Yield what writes an answer to stdout piece by piece: on a terminal escaped, and lines break at words."""
        if not sys.stdout.isatty():
            yield self.stream
            return
        wrap = WordWrap(self.stream, lambda: shutil.get_terminal_size().columns)
        try:
            yield lambda text: wrap.add(escaped(text, keeps_lines=True))
        finally:
            wrap.end()

    def result_json(self, schema: str, value: dict[str, Any]) -> None:
        """Write the whole result as one JSON object, tagged with its versioned schema, e.g. "quire.run/1"."""
        text = json.dumps({"schema": schema, **value}, ensure_ascii=False)
        self.stream(CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")  # JSON lets some of them stand

    def note(self, text: str, *, style: str = "dim") -> None:
        """Write a note to stderr, or to `logger`; not with `-q`, and not if stderr cannot be written."""
        if self.verbosity >= 0 and self.logger is not None:
            self.logger.info(text)
        elif self.verbosity >= 0:
            with contextlib.suppress(OSError):  # the result matters more than the note
                sys.stderr.write(self.style(escaped(text, keeps_lines=True), style, sys.stderr) + "\n")
                sys.stderr.flush()

    def aside(self, text: str) -> None:
        """Write a piece of text beside the result, such as reasoning, to stderr; not with `-q` or `--json`."""
        if self.verbosity >= 0 and not self.json:
            with contextlib.suppress(OSError):
                sys.stderr.write(self.style(escaped(text, keeps_lines=True), "dim", sys.stderr))
                sys.stderr.flush()

    def clear_line(self) -> None:
        """Clear the line of stderr that was written last, on a terminal that can."""
        with contextlib.suppress(OSError):
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def detail(self, text: str) -> None:
        """Write a line to stderr that only `-v` shows."""
        if self.verbosity >= 1:
            self.note(text)

    def confirm(self, what: str, question: str) -> bool:
        """Ask the question on stderr. Raises: click.UsageError, naming `what` needs --yes, without a terminal."""
        import click

        if not sys.stdin.isatty():
            raise click.UsageError(f"{what} needs --yes where nobody can be asked")
        return click.confirm(escaped(question), err=True)

    def write_file(self, option: str, path: str | os.PathLike[str], text: str) -> None:
        """Write the file that an option names, and say so. Raises: ConfigError if that is not possible."""
        with open_file(option, path) as file:
            file.write(text.encode())
        self.note(f"wrote {path}")

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()
    ) -> None:
        """Write a table to stdout, columns padded to their widest cell; those in `right` are right-aligned."""
        shown = [[escaped(cell) for cell in row] for row in (header, *rows)]
        widths = [max(map(display_width, column)) for column in zip(*shown, strict=True)]
        for row in shown:
            self.result("  ".join(padded(row, widths, right)).rstrip())


def padded(cells: Sequence[str], widths: Sequence[int], right: Container[int]) -> list[str]:
    """Return the cells of a row in the widths of their columns; those in `right` are right-aligned."""
    padding = [" " * (width - display_width(cell)) for cell, width in zip(cells, widths, strict=True)]
    return [
        space + cell if index in right else cell + space
        for index, (cell, space) in enumerate(zip(cells, padding, strict=True))
    ]


def is_capable_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that understands escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def open_file(option: str, path: str | os.PathLike[str]) -> BinaryIO:
    """Open for writing the file that an option names. Raises: ConfigError if that is not possible."""
    try:
        return open(path, "wb")
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror or error}") from None


def format_count(number: int) -> str:
    """134515008 → "134.5M"."""
    for size, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return str(number)


def format_seconds(seconds: float) -> str:
    """0.0123 → "12.3 ms"; 2.5 → "2.50 s"."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
