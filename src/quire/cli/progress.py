"""Progress of a download or load on stderr: a bar on a terminal, else a line every ten seconds; none with `-q`.

Implements the callback that `weights` and `engine` report to. rich is imported only when a bar is drawn.
Next to read: `session.py`.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from quire.byte_sizes import format_bytes
from quire.cli.output import Output
from quire.weights.progress import Progress, ignore_progress

LINE_INTERVAL_S = 10.0
PATIENCE_S = 3.0
"""Faster work has no line."""


@contextlib.contextmanager
def show_progress(output: Output) -> Iterator[Progress]:
    """Yield the progress callback of a download or load; the bar disappears at the end."""
    if output.verbosity < 0:
        yield ignore_progress
    elif draws_bars():
        bar = _Bar(output)
        try:
            yield bar
        finally:
            bar.close()
    else:
        yield LineProgress(output)


def draws_bars() -> bool:
    """Return whether stderr is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class LineProgress:
    """A line when a stage begins, then at most one per `LINE_INTERVAL_S`; none in the first `PATIENCE_S`.

    Safe from several threads.
    """

    def __init__(self, output: Output, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._clock = clock
        self._lock = threading.Lock()
        self._stage: str | None = None
        self._start_s = clock()
        self._next_s = 0.0

    def __call__(self, stage: str, done_bytes: int, total_bytes: int | None) -> None:
        """Print the progress if a line is due."""
        with self._lock:
            now = self._clock()
            if now < self._start_s + PATIENCE_S or (stage == self._stage and now < self._next_s):
                return
            self._stage, self._next_s = stage, now + LINE_INTERVAL_S
            self._output.note(progress_text(stage, done_bytes, total_bytes))


def progress_text(stage: str, done_bytes: int, total_bytes: int | None) -> str:
    """Return "downloading model 12 MiB / 93 MiB (13%)", without the parts that are unknown."""
    if total_bytes:
        share = 100 * done_bytes // total_bytes
        return f"{stage} {format_bytes(done_bytes)} / {format_bytes(total_bytes)} ({share}%)"
    return f"{stage} {format_bytes(done_bytes)}" if done_bytes else stage


class _Bar:
    """A rich progress bar, made at the first report."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._display: Any = None
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done_bytes: int, total_bytes: int | None) -> None:
        with self._lock:
            if self._display is None:
                self._display = self._make_display()
            if stage not in self._tasks:
                for task in self._tasks.values():
                    self._display.update(task, visible=False)
                self._tasks[stage] = self._display.add_task(stage, total=total_bytes)
            self._display.update(self._tasks[stage], completed=done_bytes, total=total_bytes)

    def close(self) -> None:
        """Remove the bar from the screen."""
        if self._display is not None:
            self._display.stop()

    def _make_display(self) -> Any:
        import rich.progress as bars
        from rich.console import Console

        console = Console(file=sys.stderr, no_color=not self._output.wants_color(sys.stderr))
        display = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        display.start()
        return display
