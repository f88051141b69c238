"""Text of files, models and servers cannot steer the terminal: its control characters are shown as escapes."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import cli
from quire.cli.terminal import Output, show_progress
from quire.errors import CONTROL, escaped
from quire.logs import line_handler
from tests.cli import command_line
from tests.cli.command_line import FakeEngine, Terminal, call, parsed
from tests.cli.stub_server import Handler, chunks, stub_server
from tests.cli.test_top import page, send_text
from tests.cli.tiny_directory import TEMPLATE, make_tiny_directory
from tests.engine.builders import saying

CLIPBOARD, TITLE = "\x1b]52;c;ZXZpbA==\x07", "\x1b]0;title\x1b\\"
HOSTILE = f"a{CLIPBOARD}{TITLE}\x9b31m\u202ebc\x7f\x00\b\rd"
SHOWN = r"a\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x1b\\x9b31m\u202ebc\x7f\x00\x08\rd"


def controls(text: str) -> str:
    """Return the control characters of a text that are no line ends, and no tabs."""
    return "".join(CONTROL.findall(text.replace("\n", "").replace("\t", "")))


def on_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run one command line on a terminal without colour. Returns: what it showed."""
    stream = Terminal()
    with open(os.devnull) as empty, monkeypatch.context() as patch:
        for name, file in (("stdin", empty), ("stdout", stream), ("stderr", stream)):
            patch.setattr(sys, name, file)
        patch.setenv("NO_COLOR", "1")
        with pytest.raises(SystemExit):
            cli.main([*arguments])
    return stream.getvalue()


def test_escapes_are_those_of_python_and_lines_stay() -> None:
    assert escaped(HOSTILE) == SHOWN
    assert escaped("a\tb\r\nc\n", keeps_lines=True) == "a\tb\r\nc\n"
    assert escaped("a\tb\nc\rd") == r"a\tb\nc\rd"
    for text in ("", "täglich 世界 👩‍🚀 ע\u200f", "\\x1b"):
        assert escaped(text) == text


def test_everything_that_an_output_writes_is_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, lines = Output(), f"{HOSTILE}\n\t{HOSTILE}"
    output.result(lines)
    output.note(lines)
    output.aside(lines)
    output.table([HOSTILE], [[lines]])
    captured = capsys.readouterr()
    assert controls(captured.out + captured.err) == ""
    assert captured.out.startswith(f"{SHOWN}\n\t{SHOWN}\n")
    assert captured.out.count("\n") == 4  # a cell is one line
    output.result_json("quire.x/1", {"text": lines + "\\x9b"})
    printed = capsys.readouterr().out
    assert controls(printed) == ""
    assert json.loads(printed)["text"] == lines + "\\x9b"
    monkeypatch.setattr("click.confirm", lambda question, err: question)
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert controls(output.confirm("removing", f"Remove {HOSTILE}?")) == ""  # type: ignore[arg-type]


def test_colour_is_the_only_sequence_of_our_own(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.color = "always"
    output.result(HOSTILE, style="bold")
    assert capsys.readouterr().out == f"\x1b[1m{SHOWN}\x1b[0m\n"


def test_progress_shows_a_stage_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress(Output()) as progress:
        progress(f"downloading {CLIPBOARD}\n", 0, 1)
    assert controls(terminal.getvalue().replace("\r\x1b[K", "")) == ""
    assert "\n" not in terminal.getvalue()


def test_log_lines_have_no_control_characters() -> None:
    record = logging.LogRecord("quire.weights", logging.WARNING, "", 0, "%s\n%s", (HOSTILE, HOSTILE), None)
    assert line_handler().format(record) == rf"WARNING quire.weights: {SHOWN}\n{SHOWN}"


def test_model_described_by_its_files_cannot_steer_the_terminal(tmp_path: Path) -> None:
    template = TEMPLATE + HOSTILE + "\r\n\t{# end #}"
    path = make_tiny_directory(tmp_path / f"m{CLIPBOARD}".replace("/", ""), template=template, rope_theta=HOSTILE)
    (path / "generation_config.json").write_text(json.dumps({"temperature": HOSTILE, HOSTILE: 1}))
    shown = call("show", str(path), "--template")
    assert controls(shown.output) == ""
    assert f"{SHOWN}\n\t{{# end #}}\n" in shown.stdout
    exact = parsed(call("show", str(path), "--template", "--json"))
    assert [item["source"] for item in exact["templates"].values()] == [template]
    path = make_tiny_directory(tmp_path / "n", architectures=[f"Llama{HOSTILE}\nForCausalLM"], model_type=HOSTILE)
    for line in (["show"], ["show", "--tensors"], ["run", "hi", "--model"], ["explain"], ["tokenize", "a", "--model"]):
        result = call(*line, str(path))
        assert controls(result.output) == "", line
        assert "\\x1b]52" in result.output or result.exit_code == 0


def test_errors_quote_nothing_that_steers_the_terminal() -> None:
    for line in (["run", f"./{HOSTILE[:-4]}", "hi"], [HOSTILE], ["view", HOSTILE], ["compare", "kv", HOSTILE]):
        result = call(*line)
        assert result.exit_code
        assert controls(result.output) == "", line


def test_answers_steer_no_terminal_and_reach_files_as_they_are(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "a\x1b]0;t\x07 b\n\tc"
    monkeypatch.setattr(command_line, "saying", lambda text: saying(answer))
    assert call("run", "hi there", "-q").stdout == f"{answer}\n"
    shown = on_terminal(monkeypatch, "run", "hi there")
    assert controls(shown) == ""
    assert shown.startswith("a\\x1b]0;t\\x07 b\n\tc\n")


def test_server_steers_no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if handler.path == "/metrics":
            send_text(handler, page().replace("ny", HOSTILE.replace("\r", "")))
        elif body:
            handler.send_events(chunks("Be\x1b", "]0;t\x07cause."))
        else:
            handler.send_json(404, {"error": {"message": HOSTILE, "code": HOSTILE}})

    with stub_server(answer, models=[f"m{HOSTILE}"]) as server:
        for line, wanted in (
            (["chat", "why"], "Be\\x1b]0;t\\x07cause.\n"),
            (["top", "--once", "--interval-s", "0.1"], "\\x1b]0;title"),
            (["trace", "--attach", "-o", str(tmp_path / "a.jsonl")], "the server answers 404"),
        ):
            shown = on_terminal(monkeypatch, *line, "--url", server.url)
            assert wanted in shown
            assert controls(shown) == "", line
