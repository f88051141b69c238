"""`quire learn`, `learn show` and `learn check`: the exercises of docs/learn, and the answers checked on the engine.

Exercises done are kept in `learn.json` in the user's state directory; `XDG_STATE_HOME` moves it.
Next to read: `../learn/grading.py`.
"""

import contextlib
import json
from pathlib import Path

import click

from quire.cli.command import LANGUAGES, ExitCode, language_of, option, output_of, verb
from quire.files import make_directory, read_own, replace_file

_language = option(
    "--lang", type=click.Choice(LANGUAGES), help="language of the exercises  [zh if LANG begins so, else en]"
)


@verb("learn", ("quire learn", "quire learn show 1", "quire learn check 1 3600", "quire learn --lang zh"))
@_language
def learn_command(lang: str | None) -> None:
    """List the exercises of the lessons, and which of them are done.

    An answer is a number or the file of a small program: `quire learn check` runs it in the engine.
    """
    from quire_lessons.learn.exercise import ProgramExercise, Text
    from quire_lessons.learn.grading import EXERCISES, LESSONS

    output, language, done = output_of(), language_of(lang), _read_done()
    rows = [
        {
            "number": number,
            "name": item.name,
            "lesson": item.lesson,
            "title": item.title.say(language),
            "kind": "program" if isinstance(item, ProgramExercise) else "number",
            "is_done": item.name in done,
        }
        for number, item in enumerate(EXERCISES, 1)
    ]
    if output.json:
        output.result_json("quire.learn/1", {"exercises": rows})
        return
    for lesson, title in LESSONS.items():
        output.result(f"{lesson}. {title.say(language)}")
        for row in rows:
            if row["lesson"] == lesson:
                mark, file = "x" if row["is_done"] else " ", "  file.py" * (row["kind"] == "program")
                output.result(f"  [{mark}] {row['number']:2} {row['name']:12}  {row['title']}{file}")
    num_done = sum(item.name in done for item in EXERCISES)
    text = Text(
        f"{num_done} of {len(rows)} are done. `quire learn show N` has the task, `quire learn check N ANSWER` checks"
        " it.",
        f"已完成 {num_done} / {len(rows)}。`quire learn show N` 显示题目，`quire learn check N ANSWER` 检查答案。",
    )
    output.result(f"\n{text.say(language)}")


@verb("learn show", ("quire learn show 1", "quire learn show pool", "quire learn show pool --solution"))
@click.argument("exercise")
@option("--solution", is_flag=True, help="print a right answer")
@_language
def learn_show_command(exercise: str, solution: bool, lang: str | None) -> None:
    """Print the task of an exercise; EXERCISE is its number or its name. For a program, with lines to begin with."""
    from quire_lessons.learn.exercise import NumberExercise, ProgramExercise, Text
    from quire_lessons.learn.grading import EXERCISES, LESSONS, find

    output, language, item = output_of(), language_of(lang), find(exercise)
    task, start, answer = item.task.say(language), "", ""
    if isinstance(item, ProgramExercise):
        start, answer = item.start, item.solution
    elif isinstance(item, NumberExercise) and solution:
        answer = f"{item.compute().value:.6g} {item.unit}".strip() + "\n"
    if output.json:
        value = {"name": item.name, "lesson": item.lesson, "task": task, "start": start}
        output.result_json("quire.learn.show/1", value | ({"solution": answer} if solution else {}))
        return
    if solution:
        output.stream(answer)
        return
    number = EXERCISES.index(item) + 1
    output.result(f"{number}. {item.title.say(language)}   ({item.lesson}. {LESSONS[item.lesson].say(language)})")
    output.result(f"\n{task}")
    if start:
        output.result(f"\n{start}")
    wanted = Text("FILE.py", "文件.py") if start else Text("NUMBER", "数")
    unit = f" [{item.unit}]" if isinstance(item, NumberExercise) and item.unit else ""
    output.result(f"quire learn check {number} {wanted.say(language)}{unit}")


@verb(
    "learn check",
    ("quire learn check 1 3600", 'quire learn check kv-bytes "800 KiB"', "quire learn check pool pool.py"),
)
@click.argument("exercise")
@click.argument("answer")
@_language
def learn_check_command(exercise: str, answer: str, lang: str | None) -> None:
    """Check an answer on the engine, and say what is wrong with it.

    EXERCISE is a number or a name; ANSWER is a number, with its unit, or the file of a program. A program runs in a
    process of its own, for at most 10 s; what it prints goes to stderr. The exit code is 6 for a wrong answer.
    """
    from quire_lessons.learn.exercise import Text, Wrong
    from quire_lessons.learn.grading import check, find

    output, language, item = output_of(), language_of(lang), find(exercise)
    wrong = None
    try:
        check(item, answer)
        _note_done(item.name)
    except Wrong as error:
        wrong = error.text.say(language)
    if output.json:
        output.result_json("quire.learn.check/1", {"name": item.name, "is_right": wrong is None, "reason": wrong})
    else:
        output.result(wrong or Text("Right.", "正确。").say(language))
    if wrong is not None:
        raise click.exceptions.Exit(ExitCode.CHECK_FAILED)


def _done_path() -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("quire", appauthor=False)) / "learn.json"


def _read_done() -> list[str]:
    """Return the names of the exercises that are done; none if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        names = json.loads(read_own(_done_path()))["done"]
        return [name for name in names if isinstance(name, str)]
    return []


def _note_done(name: str) -> None:
    """Add an exercise to those done. If that cannot be written, a note says so: the answer is right all the same."""
    path, done = _done_path(), _read_done()
    if name in done:
        return
    try:
        make_directory(path.parent)
        replace_file(path, [json.dumps({"done": [*done, name]}).encode()])
    except OSError as error:
        output_of().note(f"{path} cannot be written: {error.strerror}")
