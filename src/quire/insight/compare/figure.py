"""`html_page`: a comparison as one self-contained HTML file with SVG charts, readable offline, in light and dark.

`cell_text` formats a cell for the page and the terminal. Next to read: `results.py`.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

from quire.byte_sizes import format_bytes
from quire.insight.compare.results import Chart, Comparison, Series

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 240, 60, 34
DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 5")
"""Modes differ by dash and label too, not by colour alone."""
STYLE = """
:root { color-scheme: light dark; --c0: #1f6fb2; --c1: #c2571a; --c2: #2f8a4c; --c3: #8a4fb5; --c4: #6b6b6b }
@media (prefers-color-scheme: dark) {
  :root { --c0: #6db3ee; --c1: #f0a070; --c2: #7fd09a; --c3: #c79bea; --c4: #b5b5b5 }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } th, td { padding: .2rem .8rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr + tr { border-top: 1px solid #8886 }
svg { width: 100%; height: auto } text { font-size: 12px; fill: currentColor } figure { margin: 1.5rem 0 }
figcaption { font-weight: 600 } .axis { stroke: currentColor; opacity: .5 }
"""


def html_page(comparison: Comparison) -> str:
    """Return the page. It names no other file and no address."""
    columns, rows = comparison.table.columns, comparison.table.rows
    head = "".join(f'<th scope="col">{escape(column.name)}</th>' for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape(cell_text(c, col.unit))}</td>" for c, col in zip(row, columns, strict=True))
        + "</tr>"
        for row in rows
    )
    equal = "" if comparison.outputs_equal is None else f"<p>{escape(equal_text(comparison))}</p>"
    settings = ", ".join(f"{name}={value}" for name, value in comparison.settings.items() if value is not None)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>quire compare {comparison.name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<h1>quire compare {comparison.name}</h1>"
        f"<p>{escape(comparison.title)}</p>{equal}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><ul>"
        + "".join(f"<li>{escape(sentence)}</li>" for sentence in comparison.explanation)
        + f"</ul>{''.join(map(_figure, comparison.charts))}<p>{escape(settings)}</p></html>\n"
    )


def equal_text(comparison: Comparison) -> str:
    """Return the line that says which outputs were compared."""
    return f"outputs of all {comparison.outputs_equal} requests are equal in all modes ✓"


def cell_text(value: Any, unit: str) -> str:
    """Return a cell as text in its unit; "–" for None."""
    if value is None:
        return "–"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "bytes":
        return format_bytes(int(value))
    if unit == "seconds":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.2f} s"
    if unit == "number":
        return f"{value:.3g}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _figure(chart: Chart) -> str:
    if not any(series.points for series in chart.series):
        return ""
    draw = {"line": _lines, "bars": _bars, "spans": _spans}[chart.kind]
    title = escape(chart.title)
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"{draw(chart)}</svg></figure>"
    )


def _lines(chart: Chart) -> str:
    points = [point for series in chart.series for point in series.points]
    x, y = _scales([point[0] for point in points], [point[1] for point in points])
    drawn = []
    for index, series in enumerate(chart.series):
        path = " ".join(f"{x(point[0]):.1f},{y(point[1]):.1f}" for point in series.points)
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="var(--c{index % 5})" stroke-width="1.5" '
            f'stroke-dasharray="{DASHES[index % 5]}"/>'
        )
    return "".join(drawn) + _axes(chart, points) + _legend(chart.series)


def _bars(chart: Chart) -> str:
    top = max(series.points[0][1] for series in chart.series)
    height = min(30, (HEIGHT - 10) // len(chart.series))
    drawn = []
    for index, series in enumerate(chart.series):
        value = series.points[0][1]
        label = f"{escape(series.name)}: {cell_text(value, chart.y_label)}"
        width = max(1.0, value / top * (WIDTH - 320))
        drawn.append(
            f'<rect x="300" y="{index * height + 6}" width="{width:.1f}" height="{height - 8}" '
            f'fill="var(--c{index % 5})"/>'
            f'<text x="290" y="{index * height + height / 2 + 6}" text-anchor="end">{label}</text>'
        )
    return "".join(drawn)


def _spans(chart: Chart) -> str:
    points = [point for series in chart.series for point in series.points]
    rows = int(max(point[2] for point in points)) + 1
    x, _ = _scales([value for point in points for value in point[:2]], [0.0])
    height = (HEIGHT - BOTTOM - 24) / rows
    drawn = []
    for series in chart.series:
        for start, end, row in series.points:
            drawn.append(
                f'<rect x="{x(start):.1f}" y="{20 + row * height:.1f}" width="{max(0.3, x(end) - x(start)):.1f}" '
                f'height="{max(0.5, height * 0.85):.1f}" fill="var(--c0)" fill-opacity="{series.shade}"/>'
            )
    shades = {series.name: series for series in chart.series}
    legend = _legend(tuple(shades.values()), by_shade=True)
    return "".join(drawn) + _axes(chart, [(point[1], float(rows)) for point in points]) + legend


def _scales(xs: Sequence[float], ys: Sequence[float]) -> Any:
    right, top = max(xs) or 1.0, max(ys) or 1.0
    return (
        lambda value: LEFT + value / right * (WIDTH - LEFT - 20),
        lambda value: HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - 24),
    )


def _axes(chart: Chart, points: Sequence[Sequence[float]]) -> str:
    right, top = max(point[0] for point in points), max(point[1] for point in points)
    bottom, y_unit = HEIGHT - BOTTOM, chart.y_label if chart.y_label == "seconds" else "number"
    return (
        f'<path class="axis" fill="none" d="M{LEFT} 20V{bottom}H{WIDTH - 20}"/>'
        f'<text x="{LEFT}" y="{bottom + 15}">0</text>'
        f'<text x="{WIDTH - 20}" y="{bottom + 15}" text-anchor="end">{right:.4g}</text>'
        f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}</text>'
        f'<text x="{LEFT - 6}" y="28" text-anchor="end">{cell_text(top, y_unit)}</text>'
        f'<text x="4" y="14">{escape(chart.y_label)}</text>'
    )


def _legend(series: Sequence[Series], *, by_shade: bool = False) -> str:
    step = (WIDTH - LEFT - 100) / len(series)
    return "".join(
        f'<line x1="{LEFT + 60 + index * step:.0f}" x2="{LEFT + 84 + index * step:.0f}" y1="10" y2="10" '
        f'stroke-width="4" '
        f'stroke="var(--c{0 if by_shade else index % 5})" stroke-opacity="{item.shade}" '
        f'stroke-dasharray="{"" if by_shade else DASHES[index % 5]}"/>'
        f'<text x="{LEFT + 90 + index * step:.0f}" y="14">{escape(item.name)}</text>'
        for index, item in enumerate(series)
    )
