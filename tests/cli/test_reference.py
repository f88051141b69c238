"""`docs/cli.md` is what the commands say."""

from pathlib import Path

import pytest

from tests.cli.reference import BEGIN, END, main, render

ROOT = Path(__file__).parents[2]


def test_page_is_fresh_on_any_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "77")
    monkeypatch.chdir(ROOT)
    assert main(["--check"]) == 0, "run: python -m tests.cli.reference"


def test_stale_page_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "cli.md"
    page.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    page.write_text(f"Head\n{BEGIN}old\n{END}Tail\n")
    assert main(["--check"]) == 1
    assert "is stale" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert page.read_text() == f"Head\n{BEGIN}{render()}{END}Tail\n"
