"""Output of a verb, and the keys it reads: results on stdout, notes and progress on stderr.

One `Output` per command line, kept in `ctx.obj` of the root context. Names, templates and answers come from files,
models and servers: their control characters are escaped. It must not know any verb; it does not import click's
terminal code, so that `--help` stays instant. Next to read: `command.py`.
"""

import codecs
import contextlib
import json
import os
import re
import select
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from quire.byte_sizes import format_bytes
from quire.errors import CONTROL, ConfigError, escaped
from quire.text.width import display_width

if TYPE_CHECKING:
    import logging

    from quire.weights.model_files import Progress

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


# --- Progress: a line that is redrawn on a terminal, else a line every ten seconds; none with `-q` ---

REDRAW_S = 0.2
LINE_INTERVAL_S = 10.0
PATIENCE_S = 3.0
"""Faster work has no line where none is redrawn."""


@contextlib.contextmanager
def show_progress(output: Output) -> Iterator["Progress"]:
    """Yield the progress callback of a download or load; a redrawn line disappears at the end."""
    with status_line(output) as line:
        yield lambda stage, done_bytes, total_bytes: line(stage, progress_text(stage, done_bytes, total_bytes))


@contextlib.contextmanager
def status_line(output: Output, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str, str], None]]:
    """Yield a function that shows a text of a stage, if the stage is new or the last text is old enough.

    The function may be called from several threads.
    """
    redraws = is_capable_terminal(sys.stderr)
    lock = threading.Lock()
    shown_stage: str | None = None
    start_s = clock() + (0.0 if redraws else PATIENCE_S)
    next_s = 0.0

    def show(stage: str, text: str) -> None:
        nonlocal shown_stage, next_s
        with lock:
            now_s = clock()
            if output.verbosity < 0 or now_s < start_s or (stage == shown_stage and now_s < next_s):
                return
            shown_stage, next_s = stage, now_s + (REDRAW_S if redraws else LINE_INTERVAL_S)
            if redraws:
                output.clear_line()
                sys.stderr.write(escaped(text)[: shutil.get_terminal_size().columns - 1])
                sys.stderr.flush()
            else:
                output.note(text)

    try:
        yield show
    finally:
        if redraws and shown_stage is not None:
            output.clear_line()


def progress_text(stage: str, done_bytes: int, total_bytes: int | None) -> str:
    """Return "downloading model 12 MiB / 93 MiB (13%)", without the parts that are unknown."""
    if total_bytes:
        share = 100 * done_bytes // total_bytes
        return f"{stage} {format_bytes(done_bytes)} / {format_bytes(total_bytes)} ({share}%)"
    return f"{stage} {format_bytes(done_bytes)}" if done_bytes else stage


# --- Typed keys, one by one -----------------------------------------------------------------------

END = "\x04"
"""The key Ctrl-D, and the end of the input."""
ESCAPE = "\x1b"
_KEY = re.compile(r"\x1b(?:\[[\d;]*[ -~]|O.)?|.", re.DOTALL)
ReadKey = Callable[[float | None], str | None]
"""Waits for a key, at most some seconds, and returns it in lower case, or None. After the end of input: `END`."""


@contextlib.contextmanager
def typed_keys() -> Iterator[ReadKey]:
    """Yield what reads keys. Those that were typed before are not lost.

    A key that sends several characters, such as an arrow, is `ESCAPE`. Without a terminal no key comes.
    """
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    typed: deque[str] = deque()

    def read(seconds: float | None) -> str | None:
        end_s = None if seconds is None else time.monotonic() + seconds
        while not typed:
            if not select.select([file], [], [], None if end_s is None else max(0.0, end_s - time.monotonic()))[0]:
                return None
            piece = os.read(file, 64)
            typed.extend(_KEY.findall(decoder.decode(piece) if piece else END))
        key = typed.popleft()
        return ESCAPE if key.startswith(ESCAPE) else key.lower()

    before = termios.tcgetattr(file)
    tty.setcbreak(file, termios.TCSADRAIN)
    try:
        yield read
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _no_key(seconds: float | None) -> str | None:
    if seconds is None:
        return END
    time.sleep(seconds)
    return None


# --- Lines of an answer, broken at words; a terminal alone breaks at its last column --------------

# Spaces, a line break, a character that a line may break beside (those of Chinese, Japanese and Korean), or a word.
_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
_PART = re.compile(rf"[^\S\n]+|\n|[{_WIDE}]|[^\s{_WIDE}]+")
_FENCE = "```"


class WordWrap:
    """Writes text in lines of at most `columns()`. A word is held until it ends; lines of code blocks stay whole."""

    def __init__(self, write: Callable[[str], None], columns: Callable[[], int]) -> None:
        self._write, self._columns = write, columns
        self._space = self._word = ""  # not written yet: the spaces before the word, and what there is of it
        self._used = 0  # columns of the line
        self._is_code = False

    def add(self, text: str) -> None:
        """Write the words that end in `text`."""
        for part in _PART.findall(text):
            if part.isspace():
                self._end_word()
                self._space += part
                if part == "\n":
                    self._write(self._space)
                    self._space, self._used = "", 0
            else:
                is_wide = len(part) == 1 and display_width(part) == 2
                if is_wide:
                    self._end_word()
                self._word += part
                if is_wide:
                    self._end_word()

    def end(self) -> None:
        """Write what is held."""
        self._end_word()
        self._write(self._space)
        self._used += len(self._space)
        self._space = ""

    def _end_word(self) -> None:
        if not self._word:
            return
        if not self._used and self._word.startswith(_FENCE):
            self._is_code = not self._is_code
        width = display_width(self._word)
        if self._used and not self._is_code and self._used + len(self._space) + width > self._columns():
            self._write("\n" + self._word)
            self._used = width
        else:
            self._write(self._space + self._word)
            self._used += len(self._space) + width
        self._space = self._word = ""
