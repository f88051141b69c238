"""The interactive chat: history, commands, several lines, and leaving."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from quire.cli.chat import COMMANDS, Chat
from quire.cli.run import ChatEngine, sampling_params_for
from quire.cli.terminal import Output
from quire.config import EngineOptions
from quire.sampling_params import SamplingParams
from tests.cli.command_line import FakeEngine


class Typist:
    """Types the given lines; an exception among them is raised instead; then end of input."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines: Iterator[str | BaseException] = iter(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


def chat(*lines: str | BaseException, engine: FakeEngine | None = None, system: str | None = None) -> FakeEngine:
    engine = engine or FakeEngine(EngineOptions())
    Chat(
        ChatEngine(engine, Output()).ask, lambda chosen: vars(sampling_params_for(engine, chosen)), Output(), {},
        system=system, read_line=Typist(*lines),
    ).loop()  # fmt: skip
    return engine


def test_clear_keeps_the_system_message_and_system_begins_anew() -> None:
    engine = chat("one", "/clear", "two", "/system You are a pirate.", "three", system="Be brief.")
    assert engine.prompts[1]["prompt"] == "system: Be brief.\nuser: two\n"
    assert engine.prompts[2]["prompt"] == "system: You are a pirate.\nuser: three\n"


def test_set_changes_sampling_until_default_and_lists_all_values(capsys: pytest.CaptureFixture[str]) -> None:
    engine = chat("/set temperature 0.5", "/set max-tokens 3", "one", "/set", "/set temperature default", "two")
    errors = capsys.readouterr().err
    assert all(f"  {item.name} = " in errors for item in fields(SamplingParams))
    assert "  max_tokens = 3  (chosen)\n" in errors
    assert "  top_p = 1.0\n" in errors
    assert [params.temperature for params in engine.params] == [0.5, 1.0]
    assert [params.max_tokens for params in engine.params] == [3, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature 9", "temperature must be a number in [0, 2]"),
        ("/set temperature warm", "'warm'"),
        ("/set temprature 1", "did you mean 'temperature'?"),
        ("/set temperature", "needs a value"),
        ("/claer", "did you mean '/clear'?"),
    ],
)
def test_bad_commands_say_why_and_change_nothing(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = chat(line, "one")
    assert message in capsys.readouterr().err
    assert engine.params[0].temperature == 1.0


def test_saved_chat_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    chat("one", "/save trip", "two", "/clear", "other", system="Be brief.")
    turns = [("user", "one"), ("assistant", "Because."), ("user", "two"), ("assistant", "Because.")]
    path = tmp_path / "quire" / "chats" / "trip.json"
    messages = json.loads(path.read_text())
    assert [tuple(item.values()) for item in messages] == [("system", "Be brief."), *turns], "a list of OpenAI's"
    assert path.stat().st_mode & 0o077 == 0
    engine = chat("/load trip", "three", "/save copy")
    assert engine.prompts[0]["prompt"].endswith("user: two\nassistant: Because.\nuser: three\n")
    assert engine.prompts[0]["prompt"].startswith("system: Be brief.\nuser: one\n")
    assert len(json.loads(path.read_text())) == 7
    assert (path.with_name("copy.json")).read_text() == path.read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/save", "/save needs a name"),
        ("/save ../x", "cannot name a chat"),
        ("/load tripp", "there is no saved chat 'tripp' (did you mean 'trip'?); saved are trip"),
        ("/load broken", "broken.json cannot be read"),
        ("/load wrong", "wrong.json is not a list of messages"),
        ("/load", "saved: trip"),
    ],
)
def test_chats_that_cannot_be_saved_or_loaded_leave_the_conversation(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    chat("/save trip")
    for name, text in (("broken", "["), ("wrong", '[{"role": "user"}]')):
        if name in line:
            (tmp_path / "quire" / "chats" / f"{name}.json").write_text(text)
    engine = chat("one", line, "two")
    assert message in capsys.readouterr().err
    assert engine.prompts[1]["prompt"] == "user: one\nassistant: Because.\nuser: two\n"


def test_message_of_several_lines() -> None:
    engine = chat('"""', "first", "second", '"""', '"""one line"""')
    assert engine.prompts[0]["prompt"] == "user: first\nsecond\n"
    assert engine.prompts[1]["prompt"].endswith("user: one line\n")


def test_help_lists_every_command_and_blank_lines_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    engine = chat("/help", "", "   ")
    captured = capsys.readouterr()
    assert all(name in captured.err for name in COMMANDS)
    assert captured.out == ""
    assert engine.prompts == []


def test_ctrl_c_twice_at_the_prompt_leaves() -> None:
    with pytest.raises(KeyboardInterrupt):
        chat(KeyboardInterrupt(), KeyboardInterrupt())
    engine = chat(KeyboardInterrupt(), "one", KeyboardInterrupt(), "two")
    assert len(engine.prompts) == 2


def test_ctrl_c_stops_the_answer_and_once_more_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(EngineOptions())
    steps = iter(range(100))
    engine.on_step = lambda: next(steps) == 3 and os.kill(os.getpid(), signal.SIGINT)
    chat("/stats", "one", "two", "/stats", " /exit ", "never", engine=engine)
    errors = capsys.readouterr().err
    assert "No answer yet." in errors
    assert "[interrupted]" in errors
    assert "turns: 2" in errors
    assert [prompt["prompt"] for prompt in engine.prompts[1:]] == ["user: one\nassistant: Beca\nuser: two\n"]
    steps = iter(range(100))
    with pytest.raises(KeyboardInterrupt):
        chat("one", KeyboardInterrupt(), "y", "two", engine=engine)
    assert len(engine.prompts) == 3


@pytest.mark.parametrize("answer", ["y", KeyboardInterrupt(), EOFError()])
def test_second_ctrl_c_asks_before_a_chat_that_is_not_saved_is_lost(answer: str | BaseException) -> None:
    engine = FakeEngine(EngineOptions())
    with pytest.raises(KeyboardInterrupt):
        chat("one", KeyboardInterrupt(), KeyboardInterrupt(), "n", "two", KeyboardInterrupt(), KeyboardInterrupt(),
             answer, "three", engine=engine)  # fmt: skip
    assert [prompt["prompt"].count("user: ") for prompt in engine.prompts] == [1, 2]


def test_second_ctrl_c_leaves_a_saved_chat_without_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    engine = FakeEngine(EngineOptions())
    with pytest.raises(KeyboardInterrupt):
        chat("one", "/save trip", KeyboardInterrupt(), KeyboardInterrupt(), "two", engine=engine)
    assert len(engine.prompts) == 1


def test_refused_turn_is_not_history(capsys: pytest.CaptureFixture[str]) -> None:
    from quire.errors import ContextLengthError

    engine = FakeEngine(EngineOptions())
    add_request = engine.add_request

    def refuse_long(request_id: str, prompt: dict[str, object], params: object, **options: object) -> None:
        if "long" in str(prompt["prompt"]):
            raise ContextLengthError("too long")
        add_request(request_id, prompt, params, **options)

    engine.add_request = refuse_long
    chat("long", "short", engine=engine)
    assert "error[context_length_exceeded]: too long" in capsys.readouterr().err
    assert engine.prompts[0]["prompt"] == "user: short\n"
