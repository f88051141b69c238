"""All exercises in the order of the lessons, and `check`: a number at once, a program in a process with a time limit.

`python -m quire_lessons.learn.grading NAME FILE` is that process: on stdout it names each case before it runs it, then
says what it found. Next to read: `program.py`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError, nearest
from quire_lessons.learn.exercise import Exercise, NumberExercise, ProgramExercise, Text, Wrong, check_number
from quire_lessons.learn.numbers import NUMBERS
from quire_lessons.learn.programs import PROGRAMS

if TYPE_CHECKING:
    from quire_lessons.learn.program import LearnerProgram

TIME_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 4 << 30
EXERCISES: tuple[Exercise, ...] = tuple(sorted((*NUMBERS, *PROGRAMS), key=lambda item: item.lesson))
LESSONS: dict[int, Text] = {
    2: Text("Attention and masks", "注意力与掩码"),
    3: Text("The KV cache", "KV 缓存"),
    4: Text("Memory and fragmentation", "内存与碎片"),
    5: Text("Paging", "分页"),
    6: Text("Chunked prefill", "分块预填充"),
    7: Text("Continuous batching", "连续批处理"),
    8: Text("Prefix sharing", "前缀共享"),
    9: Text("Tensor parallelism", "张量并行"),
    10: Text("Quantisation", "量化"),
    12: Text("Sampling", "采样"),
    16: Text("Measure and explain a kernel's speed", "测量并解释内核的速度"),
    17: Text("Drafts", "草稿"),
    22: Text("What a request costs", "一个请求的成本"),
    24: Text("Adapters", "适配器"),
}
"""Titles of the lessons that have exercises here."""


def find(number_or_name: str) -> Exercise:
    """Return an exercise by its number, from 1 on, or its name. Raises: ConfigError."""
    names = {item.name: item for item in EXERCISES}
    if number_or_name.isdecimal() and 1 <= int(number_or_name) <= len(EXERCISES):
        return EXERCISES[int(number_or_name) - 1]
    if number_or_name not in names:
        raise ConfigError(
            f"there is no exercise '{number_or_name}'{nearest(number_or_name, names)}: 1 to {len(EXERCISES)} are there,"
            " `quire learn` lists them"
        )
    return names[number_or_name]


def check(exercise: Exercise, answer: str) -> None:
    """Check a number or the file of a program. Raises: Wrong; ConfigError for an answer that is neither."""
    if isinstance(exercise, NumberExercise):
        check_number(exercise, answer)
        return
    assert isinstance(exercise, ProgramExercise)
    path = Path(answer)
    if not path.is_file():
        raise ConfigError(
            f"'{answer}' is no file: exercise '{exercise.name}' wants a Python file that defines {exercise.defines}"
        )
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{answer} cannot be read as a program: {error}") from None
    run_program(exercise.name, path)


def run_program(name: str, path: Path, time_limit_s: float = TIME_LIMIT_S) -> None:
    """Check a program in a process of its own; what it prints goes to stderr. Raises: Wrong."""
    command = [sys.executable, "-P", "-m", "quire_lessons.learn.grading", name, str(path.resolve())]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate(timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            case = _last_case(said)
            raise Wrong(
                f"Stopped after {time_limit_s:g} s, in {case}: does a loop never end there?",
                f"运行 {time_limit_s:g} 秒后被停止，当时在 {case}：那里是否有不会结束的循环？",
            ) from None
        except BaseException:
            process.kill()
            raise
    found = json.loads(said.splitlines()[-1]) if said else {}
    if "wrong" in found:
        raise Wrong(*found["wrong"])
    if "passed" not in found:
        case = _last_case(said)
        raise Wrong(
            f"The program ended its process (exit code {process.returncode}), in {case}.",
            f"程序结束了自己的进程（退出码 {process.returncode}），当时在 {case}。",
        )


def _last_case(said: str) -> str:
    cases = [json.loads(line)["case"] for line in said.splitlines() if line.startswith('{"case"')]
    return cases[-1] if cases else "-"


def checks() -> dict[str, "Callable[[LearnerProgram], None]"]:
    """Return the check of each program; importing them loads the engine."""
    from quire_lessons.learn.queue_checks import check_hash, check_order, check_pool, check_propose
    from quire_lessons.learn.token_checks import check_keep, check_mask

    return {
        "mask": check_mask,
        "pool": check_pool,
        "order": check_order,
        "hash": check_hash,
        "keep": check_keep,
        "propose": check_propose,
    }


def grade(name: str, path: str, say: Callable[[dict[str, object]], None]) -> None:
    """Run the check of a program in this process. `say`: gets each case, then the finding."""
    from quire_lessons.learn.program import LearnerProgram

    cases = [""]

    def note(case: str) -> None:
        cases[0] = case
        say({"case": case})

    try:
        source = Path(path).read_text(encoding="utf-8")
        checks()[name](LearnerProgram(path, source, note))
        say({"passed": True})
    except Wrong as wrong:
        say({"wrong": wrong.text})
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        text = Text(
            f"The engine fails with {what} (the last call was {cases[0]}).",
            f"引擎出错：{what}（最后一次调用是 {cases[0]}）。",
        )
        say({"wrong": text})


def main(name: str, path: str) -> None:
    """Grade a program as the process that `run_program` starts: findings on stdout, the program's output on stderr."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that waits, which kills this one
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    findings = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    grade(name, path, lambda found: print(json.dumps(found, ensure_ascii=False), file=findings))
    findings.flush()
    os._exit(0)  # threads that the program started must not keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
