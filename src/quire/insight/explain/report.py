"""`Report`: quantities with their formulas, and tables, which text, JSON and HTML show alike.

Knows no model. Next to read: `explanation.py`, which makes one; `../picture.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from quire.byte_sizes import format_bytes
from quire.insight.picture import html_table, page

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


# --- One HTML file without references to others, in light and dark --------------------------------

STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } .number { text-align: right; white-space: nowrap; }
.reason, .note { color: var(--dim); } .wide { overflow-x: auto; }
.bar { display: flex; align-items: center; gap: .6rem; } .bar span { min-width: 15rem; }
svg { max-width: 100%; height: auto; font-size: 12px; fill: currentColor; }
svg polyline { fill: none; stroke: currentColor; stroke-width: 2; } svg circle { fill: #4a7; }
.bar i { display: block; height: .8rem; background: #4a7; min-width: 1px; } .bar i.compute { background: #c74; }
"""
BAR_PIXELS = 400
ROOF_WIDTH, ROOF_HEIGHT = 760, 320


def to_html(report: Report) -> str:
    """Return the page."""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    sections = "".join(map(_section, report.sections))
    return page(report.title, STYLE, notes + _roofline(report) + _times(report) + sections)


def _roofline(report: Report) -> str:
    """Draw the phases under the device's roof: FLOP/s over FLOP/B, both logarithmic (Williams 2009).

    A phase stands where its floor puts it; the roof is that of the arithmetic with the highest rate.
    """
    values = {(part.title, item.name): item.value for part in report.sections for item in part.quantities}
    read = next(value for (_, name), value in values.items() if name == "memory read")
    peaks = {name.removeprefix("products in "): value for (_, name), value in values.items() if "products in" in name}
    arithmetic = max(peaks, key=lambda name: peaks[name])
    peak = peaks[arithmetic]
    points = [
        (title, intensity, values[title, "FLOPs"] / values[title, "floor"])
        for (title, name), intensity in values.items()
        if name == "intensity" and intensity > 0
    ]
    left = 10 ** math.floor(math.log10(min(1.0, *(x for _, x, _ in points))))
    right = 10 ** math.ceil(math.log10(max(10 * peak / read, *(x for _, x, _ in points))))
    bottom, top = math.log10(read * left) - 0.2, math.log10(peak) + 0.2

    def place(x: float, y: float) -> tuple[float, float]:
        along = math.log10(x / left) / math.log10(right / left)
        return 60 + (ROOF_WIDTH - 80) * along, 20 + (ROOF_HEIGHT - 60) * (top - math.log10(y)) / (top - bottom)

    roof = " ".join(
        f"{x:.1f},{y:.1f}" for x, y in (place(left, read * left), place(peak / read, peak), place(right, peak))
    )
    drawn, legend = "", ""
    for number, (title, intensity, rate) in enumerate(points, 1):
        x, y = place(intensity, rate)
        drawn += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/><text x="{x + 8:.1f}" y="{y + 14:.1f}">{number}</text>'
        legend += (
            f"<li>{escape(title)}: {intensity:.3g} FLOP/B, at most {format_value(rate, 'FLOP/s')} of "
            f"{format_value(min(peak, read * intensity), 'FLOP/s')}</li>"
        )
    ridge_x, ridge_y = place(peak / read, peak)
    label = f"{format_value(peak, 'FLOP/s')} in {arithmetic}, from {peak / read:.3g} FLOP/B on"
    return (
        f'<h2>Roofline</h2><svg viewBox="0 0 {ROOF_WIDTH} {ROOF_HEIGHT}" width="{ROOF_WIDTH}" role="img" '
        f'aria-label="Roofline of the device with each phase"><polyline points="{roof}"/>{drawn}'
        f'<text x="{ridge_x:.1f}" y="{ridge_y - 6:.1f}" text-anchor="middle">{escape(label)}</text>'
        f'<text x="60" y="{ROOF_HEIGHT - 10}">{left:g}</text>'
        f'<text x="{ROOF_WIDTH - 20}" y="{ROOF_HEIGHT - 10}" text-anchor="end">{right:g} FLOP/B</text></svg>'
        f"<ol>{legend}</ol>"
    )


def _times(report: Report) -> str:
    """Return the time that memory and compute need in each phase, as bars on one scale."""
    found = [
        (section.title, item.name.removesuffix(" time"), item.value, item.shown)
        for section in report.sections
        for item in section.quantities
        if item.name in ("memory time", "compute time")
    ]
    longest = max((seconds for *_, seconds, _ in found), default=1.0)
    bars = "".join(
        f'<div class="bar"><span>{escape(title)}: {kind}</span>'
        f'<i class="{kind}" style="width:{BAR_PIXELS * seconds / longest:.0f}px"></i>{escape(shown)}</div>'
        for title, kind, seconds, shown in found
    )
    return f"<h2>The longer of the two binds</h2>{bars}"


def _section(section: Section) -> str:
    quantities = "".join(
        f'<tr><th scope="row">{escape(item.name)}</th><td class="number">{escape(item.shown)}</td>'
        f'<td class="reason">{escape(item.reason)}</td></tr>'
        for item in section.quantities
    )
    parts = [f"<h2>{escape(section.title)}</h2>", f"<table>{quantities}</table>" if quantities else ""]
    if section.rows:
        table = html_table(section.header, section.shown_rows(), section.right_columns)
        parts.append(f'<div class="wide">{table}</div>')
    parts += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    return "".join(parts)
