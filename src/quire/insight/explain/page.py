"""`to_html`: a report as one file without any reference to others, readable offline, in light and dark.

Next to read: `report.py`.
"""

import math
from html import escape

from quire.insight.explain.report import Report, Section, format_value
from quire.insight.picture import html_table, page

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
