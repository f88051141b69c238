"""`Failure`: why a text cannot go on, and whether its form is to blame or the library that keeps it.

The library tells its errors apart by their words only: its `stop_reason` is "InternalError" for all of them, limits
included (1.9.1, each of its limits tried). Those that a form causes are few and named below; what else it says, a panic
above all, is taken for its own, so that a fault of the server is not shown as the client's, and the log has it.
Next to read: `matcher.py`.
"""

from dataclasses import dataclass

from quire.errors import printable

NO_EXTENSION = "NoExtension"
"""How the library begins to say that nothing may come next."""
OF_FORM = (NO_EXTENSION, "too many states", "too many expressions", "Too many items", "max is")
"""What it says, in part, where a form breaks one of `limits.py` or of its own limits, or leads to nothing."""
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Failure:
    """Why nothing may follow. `is_of_form`: because of what the request asked for."""

    reason: str
    is_of_form: bool = True


def failure_of(message: str) -> Failure:
    """What an error of the library in the middle of a text means for who asked for it."""
    lines = message.splitlines()
    line = printable(lines[0]) if lines else ""
    shown = line[:_MAX_SHOWN] or "no reason given"
    if not any(words in line for words in OF_FORM):
        return Failure(f"the library that keeps texts in their form failed: {shown}", is_of_form=False)
    if line.startswith(NO_EXTENSION):
        return Failure(
            "the grammar of structured_outputs cannot be followed any further: nothing may come next, though the "
            "text is not complete; end its rules that lead to nothing but themselves"
        )
    return Failure(
        f"the grammar of structured_outputs cannot be followed any further ({shown}): make it simpler, "
        "with fewer alternatives that begin alike and smaller repetitions"
    )
