"""A program runs in a process with a time limit; exercises and lessons are those of the pages."""

import re
from pathlib import Path

import pytest

from quire.cli.command import language_of
from quire.errors import ConfigError
from quire_lessons.learn.exercise import ProgramExercise, Wrong
from quire_lessons.learn.grading import EXERCISES, LESSONS, check, find, run_program

LEARN = Path(__file__).parents[3] / "docs" / "learn"


def written(folder: Path, source: str) -> Path:
    path = folder / "answer.py"
    path.write_text(source)
    return path


def test_solution_passes_in_its_process(tmp_path: Path) -> None:
    item = find("hash")
    assert isinstance(item, ProgramExercise)
    check(item, str(written(tmp_path, item.solution)))


def test_wrong_program_is_told_through_the_process_in_both_languages(tmp_path: Path) -> None:
    with pytest.raises(Wrong) as found:
        run_program("hash", written(tmp_path, "def block_hashes(tokens, block_size, salt):\n    return tokens\n"))
    assert "3 tokens in blocks of 4 have 0 full blocks" in found.value.text.en
    assert "满块" in found.value.text.zh


def test_endless_loop_is_stopped_and_placed(tmp_path: Path) -> None:
    source = "def block_hashes(tokens, block_size, salt):\n    while True:\n        pass\n"
    for limit_s in (1.0, 10.0):  # a busy machine may not come to the program within a second
        with pytest.raises(Wrong, match=f"Stopped after {limit_s:g} s, in ") as found:
            run_program("hash", written(tmp_path, source), limit_s)
        if "in block_hashes" in str(found.value):
            break
    assert "in block_hashes([11, 12, 13], 4, '')" in str(found.value)


def test_program_that_ends_its_process_is_told_so(tmp_path: Path) -> None:
    source = "import os\n\ndef block_hashes(tokens, block_size, salt):\n    os._exit(3)\n"
    with pytest.raises(Wrong, match=r"exit code 3\), in block_hashes"):
        run_program("hash", written(tmp_path, source))


def test_prints_of_a_program_do_not_reach_the_findings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    item = find("hash")
    assert isinstance(item, ProgramExercise)
    run_program("hash", written(tmp_path, 'print(\'{"wrong": ["a", "b"]}\')\n' + item.solution))
    captured = capfd.readouterr()
    assert '"wrong"' in captured.err
    assert captured.out == ""


def test_exercise_is_found_by_number_and_name_and_the_nearest_is_named() -> None:
    assert find("1") is EXERCISES[0]
    assert find(EXERCISES[-1].name) is EXERCISES[-1]
    for wrong in ("0", str(len(EXERCISES) + 1), "pol"):
        with pytest.raises(ConfigError, match=f"1 to {len(EXERCISES)} are there"):
            find(wrong)
    with pytest.raises(ConfigError, match=r"pool"):
        find("pol")


def test_answer_that_is_no_file_names_what_the_file_must_define() -> None:
    with pytest.raises(ConfigError, match=r"a Python file that defines Pool"):
        check(find("pool"), "42")


def test_there_are_enough_exercises_with_unique_names_in_the_order_of_the_lessons() -> None:
    names = [item.name for item in EXERCISES]
    assert len(set(names)) == len(names) >= 12
    assert sum(isinstance(item, ProgramExercise) for item in EXERCISES) >= 5
    assert [item.lesson for item in EXERCISES] == sorted(item.lesson for item in EXERCISES)
    assert {item.lesson for item in EXERCISES} == set(LESSONS)


@pytest.mark.parametrize("folder", ["", "zh"])
def test_lessons_have_the_titles_of_their_pages_which_name_their_exercises(folder: str) -> None:
    for number, title in LESSONS.items():
        (page,) = (LEARN / folder).glob(f"{number:02}-*.md")
        names = [item.name for item in EXERCISES if item.lesson == number]
        assert [name for name in names if f"`quire learn show {name}`" not in page.read_text()] == [], page.name
        heading = re.match(r"# \d+\.? ?(.*)", page.read_text())
        assert heading is not None
        assert heading[1].strip() == title.say(folder or "en"), page.name


def test_language_is_that_of_the_option_then_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert (language_of(None), language_of("en")) == ("zh", "en")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert language_of(None) == "en"
