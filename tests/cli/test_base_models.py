"""Verbs with a model that has no chat template: it continues the text, or the message says what it lacks."""

from pathlib import Path
from typing import Any

import pytest

from quire.cli import run
from quire.engine.llm_engine import LLMEngine
from quire.insight.trace import EngineTrace
from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import TEMPLATE, make_tiny_directory

NOTE = "the model has no chat template and continues the text"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_directory(tmp_path_factory.mktemp("base") / "base", template=None))


def test_run_continues_the_text(base: str) -> None:
    result = call("run", base, "Once upon", "--max-tokens", "4", "--temperature", "0", "--json")
    assert (result.exit_code, NOTE in result.stderr) == (0, True)
    assert parsed(result)["prompt"] == "Once upon"
    raw = call("run", base, "Once upon", "--max-tokens", "4", "--temperature", "0", "--raw", "--json")
    assert parsed(raw)["token_ids"] == parsed(result)["token_ids"]
    assert NOTE not in raw.stderr


def test_template_of_the_user_makes_it_answer(base: str) -> None:
    result = call("run", base, "Hi", "--max-tokens", "1", "--chat-template", TEMPLATE, "--json")
    assert (parsed(result)["prompt"], NOTE in result.stderr) == ("<user>Hi<a>", False)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [([], "a chat"), (["Hi", "--system", "Be brief."], "--system"), (["Hi", "--tools", "tools.json"], "--tools")],
)
def test_what_needs_a_template_is_refused_before_the_model_is_loaded(
    base: str, arguments: list[str], what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr(LLMEngine, "build", fail)
    monkeypatch.setattr(run, "read_prompt", lambda text, **_: text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.json").write_text("[]")
    result = call("run", "--model", base, *arguments)
    assert result.exit_code == 2
    assert f"{base} has no chat template, which {what} needs" in result.stderr
    assert "--chat-template FILE" in result.stderr
    assert "chat_template=" not in result.stderr


def test_trace_records_the_continued_text(base: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = call("trace", base, "Once upon", "-o", str(path), "--max-tokens", "3")
    assert (result.exit_code, NOTE in result.stderr) == (0, True)
    first, *_ = EngineTrace.read(path).steps[0]["requests"]
    assert first["count"] == len("Once upon")


def test_tour_follows_the_continued_text(base: str) -> None:
    result = call("tour", base, "Once upon", "--max-tokens", "3", "--json")
    assert (result.exit_code, NOTE in result.stderr) == (0, True)
    assert parsed(result)["stops"]
