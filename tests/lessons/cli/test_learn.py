"""`quire learn`: the list with what is done, a task in either language, right and wrong answers."""

from pathlib import Path

import pytest

from tests.cli.command_line import call, parsed


def test_right_answer_is_kept_as_done(tmp_path: Path) -> None:
    assert "0 of " in call("learn").stdout
    result = call("learn", "check", "pairs", "3600")
    assert (result.exit_code, result.stdout) == (0, "Right.\n")
    call("learn", "check", "pairs", "3600")
    rows = parsed(call("learn", "--json"))["exercises"]
    assert [row["name"] for row in rows if row["is_done"]] == ["pairs"]
    assert "[x]  1 pairs" in call("learn").stdout
    assert list((tmp_path / "state" / "quire").iterdir()) == [tmp_path / "state" / "quire" / "learn.json"]


def test_wrong_answer_is_explained_and_exits_with_6() -> None:
    result = call("learn", "check", "1", "528")
    assert result.exit_code == 6
    assert "the 96 cached positions" in result.stdout
    assert parsed(call("learn", "check", "1", "4096", "--json"))["is_right"] is False
    assert "0 of " in call("learn").stdout


def test_damaged_state_counts_as_nothing_done(tmp_path: Path) -> None:
    path = tmp_path / "state" / "quire" / "learn.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert "0 of " in call("learn").stdout
    assert call("learn", "check", "pairs", "3600").exit_code == 0
    assert "1 of " in call("learn").stdout


def test_task_and_answers_speak_the_language_of_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "一个块的掩码" in call("learn").stdout
    assert "因果注意力" in call("learn", "show", "pairs").stdout
    assert "causal attention" in call("learn", "show", "pairs", "--lang", "en").stdout
    assert "三角形" in call("learn", "check", "pairs", "528").stdout


def test_solution_that_is_shown_passes(tmp_path: Path) -> None:
    path = tmp_path / "pool.py"
    path.write_text(call("learn", "show", "pool", "--solution").stdout)
    assert call("learn", "check", "pool", str(path)).stdout == "Right.\n"
    assert call("learn", "show", "kv-bytes", "--solution").stdout == "819200 B\n"


def test_task_of_a_program_has_lines_to_begin_with() -> None:
    shown = call("learn", "show", "mask").stdout
    assert "def mask(num_cached: int, num_new: int)" in shown
    assert "quire learn check 2 FILE.py" in shown


def test_unknown_exercise_and_missing_file_are_one_line() -> None:
    for arguments in (("show", "pol"), ("check", "pol", "1"), ("check", "pool", "nothing.py"), ("check", "pairs", "x")):
        result = call("learn", *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error[invalid_option]: ")
        assert result.stderr.count("\n") == 1
