"""Choice of the model by `quire serve`, before anything is started."""

import json

import pytest

from tests.cli.command_line import call, call_process


@pytest.mark.parametrize(
    ("arguments", "variable", "model"),
    [
        (["./argument.gguf"], None, "./argument.gguf"),
        (["--model", "./flag.gguf"], None, "./flag.gguf"),
        ([], "./variable.gguf", "./variable.gguf"),
        (["./argument.gguf"], "./variable.gguf", "./argument.gguf"),
        (["--model", "./flag.gguf"], "./variable.gguf", "./flag.gguf"),
    ],
)
def test_model_is_the_argument_else_the_flag_else_the_variable(
    arguments: list[str], variable: str | None, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("QUIRE_MODEL", variable)
    result = call("serve", "--port", "0", *arguments)
    assert result.exit_code == 3
    assert f"there is no file or directory '{model}'" in result.stderr


def test_help_shows_the_defaults_of_a_server() -> None:
    text = " ".join(call("serve", "--help").stdout.split())
    assert "[interactivity; QUIRE_PERFORMANCE_MODE]" in text
    assert "[()" not in text


def test_json_log_has_the_error_too() -> None:
    result = call_process("serve", "./nothing.gguf", "--port", "0", "--log-format", "json")
    assert result.returncode == 3
    (line,) = [json.loads(line) for line in result.stderr.splitlines()]
    assert (line["level"], line["code"]) == ("error", "model_not_found")
    assert "./nothing.gguf" in line["message"]
