"""Which word is the model and which the text."""

import io
import sys
from pathlib import Path

import click
import pytest

from quire.cli.arguments import ModelAndText, names_a_model, read_text, split_arguments
from tests.cli.command_line import FakeEngine, call


@pytest.mark.parametrize(
    "word", ["smollm2", "smolm2", "org/name", "org/name@main", "./here", "/abs/model.gguf", "model.gguf", "Qwen3-0.6B"]
)
def test_models(word: str) -> None:
    assert names_a_model(word)


@pytest.mark.parametrize(
    "word", ["Why is the sky blue?", "Hi!", "-", "", " ", "1+1=", "either/or, please", "你好", "a\nb", "x" * 5000 + "?"]
)
def test_texts(word: str) -> None:
    assert not names_a_model(word)


def test_an_existing_path_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert names_a_model("my model")
    assert not names_a_model("my models")


@pytest.mark.parametrize(
    ("words", "values", "model", "text"),
    [
        ((), {}, "smollm2", None),
        (("Hi there",), {}, "smollm2", "Hi there"),
        (("-",), {}, "smollm2", "-"),
        (("org/name",), {}, "org/name", None),
        (("org/name", "hello"), {}, "org/name", "hello"),
        (("Hi there",), {"model": "other"}, "other", "Hi there"),
    ],
)
def test_split(words: tuple[str, ...], values: dict[str, str], model: str, text: str | None) -> None:
    found = split_arguments(words, values, what="prompt")
    assert (found.model, found.text) == (model, text)


def test_unquoted_prompt_is_explained() -> None:
    with pytest.raises(click.UsageError, match="quote the prompt"):
        split_arguments(("why", "is", "it"), {}, what="prompt")


def test_model_flag_makes_a_single_word_the_prompt(engines: list[FakeEngine]) -> None:
    assert call("run", "--model", "org/name", "hello").exit_code == 0
    assert engines[0].config.options.model == "org/name"
    assert engines[0].prompts[0]["prompt"] == "user: hello\n"


def test_model_from_the_environment_is_the_default(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MODEL", "org/other")
    assert call("run", "Hi there").exit_code == 0
    assert call("run", "smollm2", "Hi there").exit_code == 0
    assert [engine.config.options.model for engine in engines] == ["org/other", "smollm2"]


def test_model_given_twice_is_an_error() -> None:
    result = call("run", "--model", "a/b", "smollm2", "Hi there")
    assert result.exit_code == 2
    assert "twice" in result.stderr


def test_tokenize_takes_a_plain_word_for_text() -> None:
    assert not names_a_model("hello", plain_word_is_model=False)
    assert names_a_model("smollm2", plain_word_is_model=False)
    assert names_a_model("org/name", plain_word_is_model=False)


@pytest.mark.parametrize("text", [None, "-"])
def test_text_from_stdin(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße\n".encode())))
    assert read_text(ModelAndText("smollm2", text)) == "Grüße"


def test_a_given_text_never_reads_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert read_text(ModelAndText("smollm2", "given")) == "given"


def test_empty_stdin_is_an_error() -> None:
    result = call("run", "hello", stdin="")
    assert result.exit_code == 2
    expected = "no text was given ('hello' is the model; as a text: smollm2 'hello'), and standard input is empty"
    assert expected in result.stderr
    assert "('smollm2' is the model), and standard input is empty" in call("run", stdin="").stderr


def test_a_word_is_utf8_whatever_the_locale_says() -> None:
    in_ascii = "été".encode().decode("ascii", "surrogateescape")
    assert read_text(ModelAndText("m", in_ascii)) == "été"
    assert read_text(ModelAndText("m", "été 😀")) == "été 😀"
    assert read_text(ModelAndText("m", "a\udcff")) == "a\ufffd"
