"""Progress on stderr: a line that is redrawn on a terminal, else a line every ten seconds; none with `-q`.

`show_progress` yields the callback that `weights` and `engine` report to. Next to read: `session.py`.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

from quire.byte_sizes import format_bytes
from quire.cli.output import Output, is_capable_terminal
from quire.errors import escaped
from quire.weights.progress import Progress

REDRAW_S = 0.2
LINE_INTERVAL_S = 10.0
PATIENCE_S = 3.0
"""Faster work has no line where none is redrawn."""


@contextlib.contextmanager
def show_progress(output: Output) -> Iterator[Progress]:
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
