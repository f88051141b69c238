"""`Report`: quantities with their formulas, and tables, which text, JSON and HTML show alike.

Knows no model. Next to read: `explanation.py`, which makes one; `page.py`, the HTML.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.byte_sizes import format_bytes

SCHEMA = "quire.explain/1"
_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its formula and the values put into it. `unit`: "B", "FLOP", "s", "FLOP/B", "B/s" or a noun."""

    name: str
    value: float
    unit: str
    formula: str = ""
    values: str = ""

    @property
    def shown(self) -> str:
        """The value as people read it."""
        return format_value(self.value, self.unit)

    @property
    def reason(self) -> str:
        """Formula and values as one text."""
        return " = ".join(part for part in (self.formula, self.values) if part)


@dataclass(slots=True)
class Section:
    """Quantities under a title, then a table: columns of the same kinds as its `units`."""

    title: str
    quantities: list[Quantity] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    header: Sequence[str] = ()
    units: Sequence[str] = ()
    rows: list[Sequence[Any]] = field(default_factory=list)

    def shown_rows(self) -> list[list[str]]:
        """The table's cells as people read them."""
        return [
            [
                cell if isinstance(cell, str) else format_value(cell, unit)
                for cell, unit in zip(row, self.units, strict=True)
            ]
            for row in self.rows
        ]

    @property
    def right_columns(self) -> frozenset[int]:
        """Columns of numbers."""
        return frozenset(index for index, unit in enumerate(self.units) if unit != "text")


@dataclass(slots=True)
class Report:
    """An explanation: title, notes and sections."""

    title: str
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)

    def quantity(self, section: str, name: str) -> Quantity:
        """Return one quantity by the titles of its section and of itself."""
        return next(
            item for part in self.sections if part.title == section for item in part.quantities if item.name == name
        )

    def to_json(self) -> dict[str, Any]:
        """Return the whole report for `SCHEMA`."""
        return asdict(self)


def format_value(value: float, unit: str) -> str:
    """1.61e10 FLOP → "16.1 GFLOP"; 5242880 B → "5.24 MB (5 MiB)"; 0.0012 s → "1.2 ms"; 1024 tokens → "1,024 tokens"."""
    if unit == "B":
        binary = f" ({format_bytes(int(value))})" if value >= 1024 else ""
        return scaled(value, "B") + binary
    if unit == "s":
        return f"{value * 1e6:.3g} µs" if value < 1e-3 else f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit in ("FLOP", "B/s", "FLOP/s", "FLOP/B"):
        return f"{value:.4g} FLOP/B" if unit == "FLOP/B" else scaled(value, unit)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"{number} {unit}".rstrip() if unit not in ("text", "count") else number


def scaled(value: float, unit: str) -> str:
    """1.61e10, "FLOP" → "16.1 GFLOP"."""
    for scale, prefix in _SCALES:
        if abs(value) >= scale:
            number = value / scale
            return f"{number:.3g} {prefix}{unit}" if number < 999.5 else f"{number:.0f} {prefix}{unit}"
    return f"{value:.3g} {unit}"
