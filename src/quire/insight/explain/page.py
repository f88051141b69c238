"""`to_html`: a report as one file without any reference to others, readable offline, in light and dark.

Next to read: `report.py`.
"""

from html import escape

from quire.insight.explain.report import Report, Section
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
.bar i { display: block; height: .8rem; background: #4a7; min-width: 1px; } .bar i.compute { background: #c74; }
"""
BAR_PIXELS = 400


def to_html(report: Report) -> str:
    """Return the page."""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    sections = "".join(map(_section, report.sections))
    return page(report.title, STYLE, notes + _times(report) + sections)


def _times(report: Report) -> str:
    """Return the time that memory and compute need in each phase, as bars on one scale."""
    found = [
        (section.title, item.name.removesuffix(" time"), item.value, item.shown)
        for section in report.sections for item in section.quantities if item.name in ("memory time", "compute time")
    ]  # fmt: skip
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
