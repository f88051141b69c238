"""Results to stdout, notes to stderr, and when there is colour."""

import io
import logging

import pytest

from quire.cli.terminal import Output, format_count, format_seconds
from tests.cli.command_line import Terminal


@pytest.mark.parametrize(
    ("color", "environment", "terminal", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"TERM": "dumb"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_color(
    color: str, environment: dict[str, str], terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    output = Output()
    output.color = color
    stream = Terminal() if terminal else io.StringIO()
    assert output.wants_color(stream) is expected
    assert (output.style("x", "red", stream) == "x") is not expected


def test_streams(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.result("result")
    output.note("note")
    output.detail("detail")
    output.result_json("quire.x/1", {"text": "a\nü"})
    assert capsys.readouterr() == ('result\n{"schema": "quire.x/1", "text": "a\\nü"}\n', "note\n")
    output.verbosity = 1
    output.detail("detail")
    assert capsys.readouterr() == ("", "detail\n")
    output.verbosity = -1
    output.note("note")
    assert capsys.readouterr() == ("", "")


def test_numbers_for_people() -> None:
    assert [format_count(n) for n in (999, 1500, 134_515_008, 7 * 10**9)] == ["999", "1.5k", "134.5M", "7.0B"]
    assert [format_seconds(s) for s in (0.0123, 0.5, 2.5)] == ["12.3 ms", "500 ms", "2.50 s"]


def test_notes_go_to_a_logger_instead(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    output = Output()
    output.logger = logging.getLogger("tests.notes")
    with caplog.at_level(logging.INFO, "tests.notes"):
        output.note("seen")
        output.verbosity = -1
        output.note("hushed")
    assert (caplog.messages, capsys.readouterr().err) == (["seen"], "")
