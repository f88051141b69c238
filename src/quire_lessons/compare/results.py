"""`RunSettings` and `Comparison`: the input and the result of every comparison, as plain values, and their drawing.

The command line prints them, and the web page's Lab sends them as JSON. Next to read: `rig.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from quire.byte_sizes import format_bytes
from quire.errors import ConfigError
from quire.insight.picture import html_table, page

FAKE_MODEL = "fake"
"""Model name of `FakeExecutor`: no weights, and a step takes one unit of time."""
MAX_REQUESTS, MAX_CONTEXT, MAX_RANK = 10_000, 1 << 17, 256
MAX_POINTS = 4096
DEFAULT_LEN = 16
"""Tokens of prompts or outputs where only the other length is given."""
MIN_DRAWN_CONTEXT = 32
Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps or requests done, and their total."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request of a workload: it generates exactly `num_tokens` tokens."""

    prompt: tuple[int, ...]
    num_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Input of a comparison. None: the comparison chooses, and reports its choice in `Comparison.settings`.

    model: model to run; `FAKE_MODEL`: no model, time counts engine steps.
    rate: requests that arrive per unit of time: per second with a model, else per step.
    rank: of adapters.
    pool_bytes: size of the KV cache. context: length of sequences, each comparison says of which.
    prompt_lens, output_lens: lengths of the requests, from the start again where there are fewer than requests.
    """

    model: str | None = None
    seed: int = 0
    requests: int | None = None
    slots: int = 8
    rate: float | None = None
    pool_bytes: int | None = None
    context: int | None = None
    rank: int | None = None
    prompt_lens: tuple[int, ...] = ()
    output_lens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("requests", 1, MAX_REQUESTS),
            ("slots", 1, 1024),
            ("context", 2, MAX_CONTEXT),
            ("rank", 1, MAX_RANK),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name}={value} is not in {least} … {most}")
        for name in ("prompt_lens", "output_lens"):
            for value in getattr(self, name):
                if not 1 <= value < MAX_CONTEXT:
                    raise ConfigError(f"{name} has {value}, which is not in 1 … {MAX_CONTEXT - 1}")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate={self.rate} is not a positive number of requests per unit of time")

    def lengths(self) -> list[tuple[int, int]]:
        """Return prompt and output tokens of each request whose lengths are given; nothing if none are."""
        given = max(len(self.prompt_lens), len(self.output_lens))
        prompts, outputs = (values or (DEFAULT_LEN,) for values in (self.prompt_lens, self.output_lens))
        count = (self.requests or given) if given else 0
        return [(prompts[at % len(prompts)], outputs[at % len(outputs)]) for at in range(count)]

    def check_context(self, name: str) -> None:
        """Raise ConfigError if the context is too short to draw lengths for the comparison `name`."""
        if self.context is not None and self.context < MIN_DRAWN_CONTEXT:
            raise ConfigError(
                f"compare {name} draws lengths of requests for context={self.context}: {MIN_DRAWN_CONTEXT} or more fits"
            )


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one mode: (x, y), or for spans (start, end, row). `shade`: weight of its colour, 0 … 1."""

    name: str
    points: tuple[tuple[float, ...], ...]
    shade: float = 1.0


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of series.

    Fields:
        kind: "line", "spans" (horizontal bars), or "bars" (spans from 0, one per series).
        x_most: right end of the x-axis, where several charts share one; None: the largest value.
    """

    title: str
    x_label: str
    y_label: str
    kind: str
    series: tuple[Series, ...]
    x_most: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `run`. `outputs_equal`: requests whose tokens were compared and equal in all modes; None: no outputs.

    columns: name and unit of each: "", "text", "number", "share", "times", "bytes",
        "seconds" or "steps".
    rows: figures of each mode, its name first; None where nothing was measured.
    explanation: a sentence per mode that explains its figures.
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Any, ...], ...]
    explanation: tuple[str, ...]
    charts: tuple[Chart, ...]
    outputs_equal: int | None = None


def thinned(points: Iterable[tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
    """Return points of a line, at most `MAX_POINTS` or so: a long run has a million steps, a drawing 760 columns."""
    found = tuple(points)
    every = -(-len(found) // MAX_POINTS) or 1
    return found[::every] + (found[-1:] if (len(found) - 1) % every else ())


def percentile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


# --- One HTML file with SVG charts, readable offline, in light and dark; or its charts as an SVG file ---

WIDTH, HEIGHT = 760, 240
DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 5")
"""Modes differ by dash and label too, not by colour alone."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } th, td { padding: .2rem .8rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr + tr { border-top: 1px solid #8886 }
svg { width: 100%; height: auto }
"""
SVG_STYLE = """
:root { color-scheme: light dark; --c0: #1f6fb2; --c1: #c2571a; --c2: #2f8a4c; --c3: #8a4fb5; --c4: #6b6b6b }
@media (prefers-color-scheme: dark) {
  :root { --c0: #6db3ee; --c1: #f0a070; --c2: #7fd09a; --c3: #c79bea; --c4: #b5b5b5 }
}
text { font-size: 12px; fill: currentColor } .axis { stroke: currentColor; opacity: .5 }
:root { color: #111 } @media (prefers-color-scheme: dark) { :root { color: #eee } }"""


def html_page(comparison: Comparison) -> str:
    """Return the page. It names no other file and no address."""
    table = html_table(
        [name for name, _ in comparison.columns], [row_texts(comparison, row) for row in comparison.rows]
    )
    equal = "" if comparison.outputs_equal is None else f"<p>{escape(equal_text(comparison))}</p>"
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in comparison.explanation)
    settings = ", ".join(f"{name}={value}" for name, value in comparison.settings.items() if value is not None)
    shown = (
        f"<p>{escape(comparison.title)}</p>{equal}{table}<ul>{sentences}</ul>{svg_image(comparison)}"
        f"<p>{escape(settings)}</p>"
    )
    return page(f"quire compare {comparison.name}", STYLE, shown)


def svg_image(comparison: Comparison) -> str:
    """Return the charts, one below the other, as one SVG file. Its background is that of the page around it."""
    y, drawn = 0, ""
    for chart in comparison.charts:
        drawing, height = _drawing(chart)
        if drawing:
            title = f'<text x="4" y="14" font-weight="bold">{escape(chart.title)}</text>'
            drawn += f'<g transform="translate(0 {y})">{title}<g transform="translate(0 20)">{drawing}</g></g>\n'
            y += height + 44
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" role="img"'
        f' aria-label="{escape(comparison.title)}" font-family="system-ui, sans-serif">'
        f"<style>{SVG_STYLE}</style>\n{drawn}</svg>\n"
    )


def equal_text(comparison: Comparison) -> str:
    """Return the line that says which outputs were compared."""
    return f"requests with equal outputs in all modes: {comparison.outputs_equal} of {comparison.outputs_equal} ✓"


def row_texts(comparison: Comparison, row: Sequence[Any]) -> list[str]:
    """Return a row's cells as text."""
    return [cell_text(cell, unit) for cell, (_, unit) in zip(row, comparison.columns, strict=True)]


def cell_text(value: Any, unit: str) -> str:
    """Return a cell as text in its unit; "–" for None."""
    if value is None:
        return "–"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "bytes":
        return format_bytes(int(value))
    if unit == "times":
        return f"{value:,.1f}×"
    if unit == "seconds":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.2f} s"
    if unit == "number":
        return f"{value:.3g}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _drawing(chart: Chart) -> tuple[str, int]:
    """Draw a chart; nothing if it has no points. Bars are spans with their own colour, labelled in their row.

    Returns: the shapes, and the height of the drawing.
    """
    points = [point for series in chart.series for point in series.points]
    if not points:
        return "", 0
    is_line, is_bars = chart.kind == "line", chart.kind == "bars"
    top = max(point[1] for point in points) if is_line else max(point[2] for point in points) + 1
    height = HEIGHT if not is_bars else int(top) * 30 + 60
    left, bottom = 300 if is_bars else 60, height - 34
    x_most = chart.x_most or max(point[0 if is_line else 1] for point in points) or 1.0
    x_unit = (WIDTH - left - 20) / x_most
    y_unit, step = (bottom - 24) / (top or 1.0), (WIDTH - 160) / len(chart.series)
    drawn: list[str] = []
    labels: dict[str, str] = {}
    for index, series in enumerate(chart.series):
        color = f"var(--c{0 if chart.kind == 'spans' else index % 5})"
        legend = f'<text x="{130 + index * step:.0f}" y="14">{escape(series.name)}</text>'
        if is_line:
            path = " ".join(f"{left + x * x_unit:.1f},{bottom - y * y_unit:.1f}" for x, y in series.points)
            style = f'fill="none" stroke="{color}" stroke-dasharray="{DASHES[index % 5]}"'
            drawn.append(f'<polyline points="{path}" stroke-width="1.5" {style}/>')
            legend += f'<path d="M{100 + index * step:.0f} 10h24" stroke-width="4" {style}/>'
        else:
            style = f'fill="{color}" fill-opacity="{series.shade}"'
            drawn += [
                f'<rect x="{left + start * x_unit:.1f}" y="{22 + row * y_unit:.1f}" '
                f'width="{max(0.3, (end - start) * x_unit):.1f}" height="{max(0.5, y_unit * 0.85):.1f}" {style}/>'
                for start, end, row in series.points
            ]
            legend += f'<rect x="{110 + index * step:.0f}" y="5" width="14" height="10" {style}/>'
        if is_bars:
            label = f"{series.name}: {cell_text(series.points[0][1], chart.x_label)}"
            legend = (
                f'<text x="{left - 8}" y="{22 + (index + 0.55) * y_unit:.0f}" text-anchor="end">{escape(label)}</text>'
            )
        labels.setdefault(series.name, legend)
    axes = "" if is_bars else _axes(chart, (WIDTH - left - 20) / x_unit, top, bottom)
    return "".join(drawn) + "".join(labels.values()) + axes, height


def _axes(chart: Chart, right: float, top: float, bottom: int) -> str:
    y_text = cell_text(top, "seconds" if chart.y_label == "seconds" else "number") if chart.kind == "line" else ""
    return (
        f'<path class="axis" fill="none" d="M60 20V{bottom}H{WIDTH - 20}"/>'
        f'<text x="60" y="{bottom + 15}">0</text>'
        f'<text x="{WIDTH - 20}" y="{bottom + 15}" text-anchor="end">{right:.4g}</text>'
        f'<text x="{WIDTH / 2}" y="{bottom + 28}" text-anchor="middle">{escape(chart.x_label)}</text>'
        f'<text x="54" y="28" text-anchor="end">{y_text}</text><text x="4" y="14">{escape(chart.y_label)}</text>'
    )
