"""`docs/cli.md` is what the commands say."""

from pathlib import Path

import click
import pytest

from quire.cli.exit_codes import ExitCode
from quire.cli.main import VERBS, cli
from quire.cli.reference import main, render
from quire.config import EngineOptions

ROOT = Path(__file__).parents[2]


def test_the_page_is_fresh() -> None:
    assert main(["--check", str(ROOT / "docs" / "cli.md")]) == 0, "run: python -m quire.cli.reference"


def test_the_page_has_verbs_options_variables_and_codes() -> None:
    text = render()
    for verb in VERBS:
        assert f"\n## quire {verb}\n" in text
    for code in ExitCode:
        assert f"\n| {int(code)} | " in text
    for name in EngineOptions.__dataclass_fields__:
        assert f"`QUIRE_{name.upper()}`" in text
        assert f"--{name.replace('_', '-')} " in text or f"]{name.replace('_', '-')}`" in text


def test_all_placeholders_of_values_are_written_alike() -> None:
    """In capitals; a choice shows its values as they are."""
    context = click.Context(cli, info_name="quire")
    for name in VERBS:
        command = cli.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            if not isinstance(parameter, click.Option) or parameter.is_flag or parameter.count:
                continue
            text = parameter.make_metavar(click.Context(command, info_name=name))
            assert text == text.upper() or isinstance(parameter.type, click.Choice), (name, parameter.name, text)


def test_the_page_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = render()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "77")
    assert render() == text


def test_a_stale_page_is_found_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "docs" / "cli.md"
    assert main(["--check", str(page)]) == 1
    assert main([str(page)]) == 0
    assert main(["--check", str(page)]) == 0
    page.write_text(page.read_text() + "edited")
    assert main(["--check", str(page)]) == 1
    assert "is stale" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--chek"], ["page.txt"], ["a.md", "b.md"], ["--check", "--help"]])
def test_a_wrong_argument_writes_nothing_but_the_usage(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == "usage: python -m quire.cli.reference [--check] [PAGE.md]\n"
    assert list(tmp_path.iterdir()) == []


def test_another_page_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "README.md"
    page.write_text("# Another page\n")
    assert main([str(page)]) == 2
    assert page.read_text() == "# Another page\n"
    assert "is another page" in capsys.readouterr().err
    page.write_text("")
    assert main([str(page)]) == 0


def test_a_path_that_cannot_be_used_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "file").write_text("")
    for arguments in (["folder.md"], ["--check", "folder.md"], ["file/page.md"]):
        assert main([*arguments[:-1], str(tmp_path / arguments[-1])]) == 2
        error = capsys.readouterr().err
        assert "cannot be used: " in error
        assert error.count("\n") == 1


def test_a_page_that_is_no_text_is_stale(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(b"\xff\xfe")
    assert main(["--check", str(page)]) == 1
    assert main([str(page)]) == 2
