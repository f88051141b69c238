"""Parts of an exercise: its texts in two languages, the answer with the usual mistakes, a learner's program.

Must not know any exercise. Next to read: `grading.py`, which lists and checks them.
"""

import math
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import ConfigError

LANGUAGES = ("en", "zh")
TOLERANCE = 0.01
"""Largest relative error of an answer that is not a count: it may be rounded to three digits."""


class Text(NamedTuple):
    """A sentence in each language."""

    en: str
    zh: str

    def say(self, language: str) -> str:
        """Return the sentence in a language of `LANGUAGES`."""
        return self.zh if language == "zh" else self.en


class Wrong(Exception):
    """An answer or a program is wrong; `text` says in which case, what holds there, and what came."""

    def __init__(self, en: str, zh: str) -> None:
        super().__init__(en)
        self.text = Text(en, zh)


@dataclass(frozen=True, slots=True)
class NumberAnswer:
    """The right number, and the reason behind each of some wrong ones."""

    value: float
    mistakes: Mapping[float, Text] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exercise:
    """An exercise of a lesson. `name` is that of its test, and of a program's check."""

    name: str
    lesson: int
    title: Text
    task: Text


@dataclass(frozen=True, slots=True)
class NumberExercise(Exercise):
    """A question with a number as the answer. `unit`: "" for a count, "%", "B", or the unit of a rate or price."""

    unit: str
    compute: Callable[[], NumberAnswer]


@dataclass(frozen=True, slots=True)
class ProgramExercise(Exercise):
    """A function or class to write. `start`: where to begin; `solution`: a program that passes; `check` grades one."""

    defines: str
    start: str
    solution: str


_FACTORS = {
    "": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40,
}  # fmt: skip
_NUMBER = re.compile(r"([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?) *(.*)", re.IGNORECASE)


def parse_number(text: str, unit: str) -> float:
    """Return the number that an answer says, in the exercise's unit: "800 KiB" is 819200 for "B".

    Raises: ConfigError if it is no number, or its unit is another.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"'{text}' is not a number: answer e.g. '{_example(unit)}'")
    value, given = float(found[1].replace(",", "")), found[2].strip()
    if unit == "B":
        prefix = re.fullmatch(r"([kmgt]?i?)(?:b|bytes?)?", given, re.IGNORECASE)
        factor = _FACTORS.get(prefix[1].lower()) if prefix else None
        if factor is not None:
            return value * factor
    elif given.lower() in ("", unit.lower(), *(["percent"] if unit == "%" else [])):
        return value
    raise ConfigError(
        f"the unit of '{text}' does not fit: the answer is in {unit or 'no unit'}, e.g. '{_example(unit)}'"
    )


def _example(unit: str) -> str:
    return "800 KiB" if unit == "B" else f"12 {unit}".strip()


def check_number(exercise: NumberExercise, text: str) -> None:
    """Compare an answer with the engine's. Raises: Wrong, which explains a usual mistake; ConfigError for no number."""
    given, answer = parse_number(text, exercise.unit), exercise.compute()
    if _is_close(given, answer.value, exercise.unit):
        return
    for value, why in answer.mistakes.items():
        if _is_close(given, value, exercise.unit):
            raise Wrong(*why)
    for factor, names in _SLIPS.items():
        if exercise.unit and any(_is_close(given, answer.value * it, exercise.unit) for it in (factor, 1 / factor)):
            raise Wrong(*names)
    much = given / answer.value if answer.value else 0
    if given < answer.value:
        raise Wrong(
            f"Too small: {text} is {much:.2g} times the engine's number.",
            f"太小：{text} 是引擎所得数的 {much:.2g} 倍。",
        )
    raise Wrong(
        f"Too large: {text} is {much:.2g} times the engine's number.", f"太大：{text} 是引擎所得数的 {much:.2g} 倍。"
    )


_SLIPS = {
    2.0: Text("Off by a factor of 2: are keys and values both counted, once each, and is a weight 2 FLOPs?",
              "差了 2 倍：键和值是否各算了一次？每个权重是否算作 2 次浮点运算？"),
    2.0**10 / 1e3: Text("Off by a factor of 1.024: KiB are 1024 bytes, kB are 1000.",
                        "差了 1.024 倍：KiB 是 1024 字节，kB 是 1000 字节。"),
    2.0**20 / 1e6: Text("Off by a factor of 1.049: MiB are 2^20 bytes, MB are 10^6.",
                        "差了 1.049 倍：MiB 是 2^20 字节，MB 是 10^6 字节。"),
    2.0**30 / 1e9: Text("Off by a factor of 1.074: GiB are 2^30 bytes, GB are 10^9.",
                        "差了 1.074 倍：GiB 是 2^30 字节，GB 是 10^9 字节。"),
    1e3: Text("Off by a factor of 1000: look at the unit.", "差了 1000 倍：请检查单位。"),
    2.0**10: Text("Off by a factor of 1024: look at the unit.", "差了 1024 倍：请检查单位。"),
    1e6: Text("Off by a factor of a million: look at the unit.", "差了一百万倍：请检查单位。"),
}  # fmt: skip


def _is_close(given: float, value: float, unit: str) -> bool:
    return given == value if unit == "" else abs(given - value) <= TOLERANCE * abs(value)


# --- A learner's program; an exception or a wrong type becomes one sentence -----------------------

MAX_SHOWN = 70


def shown(value: object) -> str:
    """Return a value as a message shows it: cut in the middle when it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} … {text[-MAX_SHOWN // 2 :]}"


class LearnerProgram:
    """A learner's module. `note`: told each case before it runs, so that an endless loop can be placed."""

    def __init__(self, path: str, source: str, note: Callable[[str], None]) -> None:
        """Run the module. Raises: Wrong if that fails."""
        self._path, self._note = path, note
        self._names: dict[str, Any] = {"__name__": "answer"}
        self._run(Path(path).name, lambda: exec(compile(source, path, "exec"), self._names))

    def defined(self, name: str) -> Any:
        """Return what the program defines under a name. Raises: Wrong."""
        if not callable(self._names.get(name)):
            raise Wrong(f"The program does not define {name}.", f"程序没有定义 {name}。")
        return self._names[name]

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the program. Raises: Wrong for any exception of it, with its line."""
        return self.invoke(name, self.defined(name), *args)

    def invoke(self, name: str, function: Any, *args: Any) -> Any:
        """Call what the program made, as `name`. Raises: Wrong for any exception of it, with its line."""
        return self._run(f"{name}({', '.join(map(shown, args))})", lambda: function(*args))

    def _run(self, case: str, action: Callable[[], Any]) -> Any:
        self._note(case)
        try:
            return action()
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == self._path]
            if isinstance(error, SyntaxError):
                lines = [error.lineno]
            what = f"{type(error).__name__}: {getattr(error, 'msg', error)}".rstrip(": ")
            at, at_zh = (f" in line {lines[-1]}", f"在第 {lines[-1]} 行") if lines else ("", "")
            raise Wrong(f"{case} raises {what}{at}.", f"{case} {at_zh}抛出 {what}。") from None


def require_numbers(value: Any, case: str, length: int | None = None) -> list[float]:
    """Return a list of numbers. Raises: Wrong for any other value, or another length."""
    try:
        # Arrays of NumPy are lists of numbers too.
        found = [item + 0 for item in value]
    except TypeError:
        found = None
    if found is None or isinstance(value, (dict, set)) or length not in (None, len(found)):
        many, many_zh = ("", "") if length is None else (f"{length} ", f" {length} 个")
        raise Wrong(
            f"{case} must return a list of {many}numbers; it returns {shown(value)}.",
            f"{case} 应返回{many_zh}数的列表，却返回 {shown(value)}。",
        )
    return found


def require_number(value: Any, case: str) -> float:
    """Return a number. Raises: Wrong for any other value, and for NaN, which has no place in an order."""
    try:
        number = float(value + 0)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise Wrong(
            f"{case} must return a number; it returns {shown(value)}.", f"{case} 应返回一个数，却返回 {shown(value)}。"
        )
    return number
