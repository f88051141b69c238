"""`LearnerProgram`: a learner's module, whose functions checks call; an exception or a wrong type becomes one sentence.

Next to read: `queue_checks.py` and `token_checks.py`, which call it; `grading.py`, the process around it.
"""

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_lessons.learn.exercise import Wrong

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
