"""Division of the words of a command line into model and text."""

import io
import sys
from pathlib import Path

import click
import pytest

from quire.cli.options import names_a_model, read_prompt
from quire.errors import PromptError
from tests.cli.command_line import FakeEngine, call


@pytest.mark.parametrize(
    "word",
    [
        "smollm2",
        "smolm2",
        "org/name",
        "org/name@main",
        "org/name:Q4_K_M",
        "./here:Q8_0",
        "./here",
        "/abs/model.gguf",
        "model.gguf",
        "Qwen3-0.6B",
    ],
)
def test_models(word: str) -> None:
    assert names_a_model(word)


@pytest.mark.parametrize(
    "word", ["Why is the sky blue?", "Hi!", "-", "", " ", "1+1=", "either/or, please", "你好", "a\nb", "x" * 5000 + "?"]
)
def test_texts(word: str) -> None:
    assert not names_a_model(word)
    assert not names_a_model("hello", plain_word_is_model=False)


def test_existing_path_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert names_a_model("my model")
    assert not names_a_model("my models")


def test_model_comes_from_the_flag_the_argument_or_the_environment(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("run", "--model", "org/name", "hello").exit_code == 0
    assert engines[0].prompts[0]["prompt"] == "user: hello\n"
    monkeypatch.setenv("QUIRE_MODEL", "org/other")
    assert call("run", "Hi there").exit_code == 0
    assert call("run", "smollm2", "Hi there").exit_code == 0
    assert [engine.config.options.model for engine in engines] == ["org/name", "org/other", "smollm2"]


@pytest.mark.parametrize(
    ("word", "file", "text"),
    [(None, "q.txt", "from file"), ("Sum up.", "q.txt", "from file\n\nSum up."), (None, "-", "piped"),
     ("Sum up.", "-", "piped\n\nSum up.")],
)  # fmt: skip
def test_prompt_is_a_file_and_the_word(
    word: str | None, file: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.txt").write_text("from file\n")
    Path("empty.txt").touch()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped\n")))
    assert read_prompt(word, missing="", file=file) == text
    for bad, error, message in (
        ("absent.txt", click.UsageError, "-f absent.txt cannot be read: No such file"),
        ("empty.txt", PromptError, "-f empty.txt: the prompt is empty"),
    ):
        with pytest.raises(error, match=message):
            read_prompt(word, missing="", file=bad)
    with pytest.raises(click.UsageError, match="given twice"):
        read_prompt("-", missing="", file=file)


@pytest.mark.parametrize(
    ("word", "piped", "text"),
    [
        (None, "Grüße\n", "Grüße"),
        ("-", "Grüße\n", "Grüße"),
        ("explain", "Grüße\n", "Grüße\n\nexplain"),
        ("explain", "", "explain"),
        ("été".encode().decode("ascii", "surrogateescape"), "", "été"),
        ("a\udcff", "", "a\ufffd"),
    ],
)
def test_prompt_is_piped_input_and_the_word(
    word: str | None, piped: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
    assert read_prompt(word, missing="") == text


def test_empty_stdin_is_an_error_that_names_the_prompt_form() -> None:
    result = call("run", "hello", stdin="")
    assert result.exit_code == 2
    expected = "('hello' is the model; to use it as the prompt: quire run smollm2 'hello'), and standard input is empty"
    assert expected in result.stderr
    assert "('smollm2' is the model), and standard input is empty" in call("run", stdin="").stderr
