"""Progress lines: a new one per stage and interval; on a terminal one that is redrawn and disappears."""

import sys

import pytest

from quire.cli import terminal
from quire.cli.terminal import LINE_INTERVAL_S, PATIENCE_S, Output, progress_text, show_progress, status_line
from tests.cli.command_line import Terminal


def test_line_per_stage_and_interval_after_the_first_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with status_line(Output(), lambda: now) as show:
        show("fast", "not shown")
        for second in range(int(3 * LINE_INTERVAL_S)):
            now = PATIENCE_S + second
            show("downloading", f"downloading {second}")
        show("verifying", "verifying")
    assert capsys.readouterr() == ("", "downloading 0\ndownloading 10\ndownloading 20\nverifying\n")


def test_text_has_only_known_parts() -> None:
    assert progress_text("loading", 0, None) == "loading"
    assert progress_text("loading", 2048, None) == "loading 2 KiB"
    assert progress_text("loading", 512, 1024) == "loading 512 B / 1 KiB (50%)"


@pytest.mark.parametrize(
    ("term", "verbosity", "written"),
    [
        ("xterm", 0, "\r\x1b[Kloading 512 B / 1 KiB (50%)\r\x1b[Kverifying 10 B\r\x1b[K"),
        ("dumb", 0, "loading 512 B / 1 KiB (50%)\nverifying 10 B\n"),
        ("xterm", -1, ""),
    ],
)
def test_terminal_has_one_redrawn_line(
    term: str, verbosity: int, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", Terminal())
    output = Output()
    output.color, output.verbosity = "never", verbosity
    with show_progress(output) as report:
        report("loading", 512, 1024)
        report("verifying", 10, None)
    assert sys.stderr.getvalue() == written
