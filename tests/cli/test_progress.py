"""Progress without a terminal: lines, not too many; on a terminal a bar that leaves nothing behind."""

import sys

import pytest

from quire.cli.output import Output
from quire.cli.progress import LINE_INTERVAL_S, PATIENCE_S, LineProgress, progress_text, show_progress
from tests.cli.command_line import Terminal


def test_line_per_stage_and_interval(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = LineProgress(Output(), clock=lambda: now)
    for second in range(int(3 * LINE_INTERVAL_S)):
        now = PATIENCE_S + second
        progress("downloading", second, 100)
    progress("verifying", 0, None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "downloading 0 B / 100 B (0%)",
        "downloading 10 B / 100 B (10%)",
        "downloading 20 B / 100 B (20%)",
        "verifying",
    ]


def test_fast_work_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress(Output(), clock=lambda: 5.0)
    progress("loading", 1, 2)
    progress("verifying", 1, 2)
    assert capsys.readouterr().err == ""


def test_text_has_only_known_parts() -> None:
    assert progress_text("loading", 0, None) == "loading"
    assert progress_text("loading", 2048, None) == "loading 2 KiB"
    assert progress_text("loading", 512, 1024) == "loading 512 B / 1 KiB (50%)"


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.verbosity = -1
    with show_progress(output) as progress:
        progress("loading", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_bar_on_a_terminal_and_lines_on_a_dumb_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.progress.PATIENCE_S", 0.0)
    written = {}
    for term in ("xterm", "dumb"):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(sys, "stderr", Terminal())
        with show_progress(Output()) as progress:
            progress("loading weights", 512, 1024)
            progress("verifying", 10, None)
        written[term] = sys.stderr.getvalue()
    assert "loading weights" in written["xterm"]
    assert "\x1b[" in written["xterm"]
    assert written["dumb"] == "loading weights 512 B / 1 KiB (50%)\nverifying 10 B\n"
