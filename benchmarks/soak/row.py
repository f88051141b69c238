"""Row of the tables, and its statistics."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Check = tuple[str, object, bool]


@dataclass
class Row:
    """`id | what | measured | pass?`. `checks`: what was measured, its value, whether that is within its limit."""

    id: str
    what: str
    checks: list[Check] = field(default_factory=list)

    def check(self, name: str, value: object, *, passes: bool) -> None:
        """Add a measurement with a limit."""
        self.checks.append((name, value, passes))

    def note(self, name: str, value: object) -> None:
        """Add a measurement without a limit."""
        self.checks.append((name, value, True))

    @property
    def passes(self) -> bool:
        """True if every limit holds."""
        return all(passes for _, _, passes in self.checks)

    def cells(self) -> list[str]:
        """As the table shows it; what fails has an exclamation mark."""
        measured = ", ".join(f"{name} {_shown(value)}{'' if passes else ' (!)'}" for name, value, passes in self.checks)
        return [self.id, self.what, measured, "yes" if self.passes else "NO"]


def at_percent(values: Iterable[float], percent: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the straight line with the least squares; 0 without two different xs."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    below = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / below if below else 0.0


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
