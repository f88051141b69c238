"""`Picture`: rows of coloured cells with a legend, drawn as text for the terminal or as SVG.

Next to read: `view.py`, which makes the pictures.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from textwrap import wrap

from quire.text.width import display_width

CELL, ROW, LEFT, FONT, MAX_LINE = 9, 15, 190, 12, 150
COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")
"""Of requests, in turn."""
STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2rem;background:#fff;color:#111}"
    "section{overflow-x:auto;margin-bottom:2rem}"
)
"""Of a page of pictures, which have colours for a white page only."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of cell: the character that shows it in text, its colour in SVG, and its meaning."""

    character: str
    colour: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Row:
    """A label, cells (names of kinds), and a remark behind them."""

    label: str
    cells: Sequence[str] = ()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing that explains itself.

    Fields:
        caption: what the reader sees. formula: how the numbers were computed, with the values put in.
        source: the file of the package that decides what is shown.
    """

    title: str
    caption: str
    formula: str
    source: str
    kinds: Mapping[str, Kind]
    rows: Sequence[Row] = field(default_factory=list)

    @property
    def used_kinds(self) -> list[Kind]:
        """The kinds that occur and have a meaning, in the order of `kinds`."""
        used = {cell for row in self.rows for cell in row.cells}
        return [kind for name, kind in self.kinds.items() if name in used and kind.meaning]

    def translated(self, translate: Callable[[str], str]) -> "Picture":
        """Return the picture with its sentences in another language."""
        rows = [replace(row, label=translate(row.label), remark=translate(row.remark)) for row in self.rows]
        kinds = {name: replace(kind, meaning=translate(kind.meaning)) for name, kind in self.kinds.items()}
        title, caption, formula = map(translate, (self.title, self.caption, self.formula))
        return Picture(title, caption, formula, self.source, kinds, rows)

    def to_text(self) -> str:
        """Return the picture for a terminal."""
        width = max((display_width(row.label) for row in self.rows), default=0)
        lines = [self.title, ""]
        for row in self.rows:
            cells = "".join(self.kinds[cell].character for cell in row.cells)
            label = " " * (width - display_width(row.label)) + row.label
            lines.append(f"{label}  {cells}{'  ' if cells else ''}{row.remark}".rstrip())
        legend = "   ".join(f"{kind.character} {kind.meaning}" for kind in self.used_kinds)
        return "\n".join([*lines, "", *filter(None, (legend, self.caption, self.formula)), f"code: {self.source}"])

    def to_svg(self) -> str:
        """Return the picture as one SVG element; characters beside colours tell the kinds apart."""
        widest = max((len(row.cells) for row in self.rows), default=0)
        remark = max((display_width(row.remark) for row in self.rows), default=0)
        texts = [line for text in (self.caption, self.formula) for line in wrap(text, MAX_LINE) or [""]]
        texts.append(f"code: {self.source}")
        left = max([LEFT, *(8 + display_width(row.label) * FONT * 6 // 10 + 12 for row in self.rows)])
        width = left + widest * CELL + max(remark, 40) * FONT * 6 // 10 + 30
        width = max(width, max(map(display_width, texts)) * FONT * 6 // 10 + 20)
        y, shapes = 40, [_text(8, 20, self.title, "bold")]
        for row in self.rows:
            shapes.append(_text(8, y + 11, row.label))
            x = left
            for cell, run in groupby(row.cells):
                # One dashed line draws a run of cells, which keeps files small.
                kind, end = self.kinds[cell], x + CELL * len(list(run))
                shapes.append(
                    f'<path d="M{x} {y + (ROW - 2) / 2}H{end - 1}" stroke="{kind.colour}" stroke-width="{ROW - 2}" '
                    f'stroke-dasharray="{CELL - 1} 1"><title>{escape(kind.meaning)}</title></path>'
                )
                x = end
            shapes.append(_text(left + len(row.cells) * CELL + 8, y + 11, row.remark))
            y += ROW
        y += 12
        for kind in self.used_kinds:
            shapes.append(f'<rect x="8" y="{y}" width="{CELL - 1}" height="{ROW - 2}" fill="{kind.colour}"/>')
            shapes.append(_text(24, y + 11, f"{kind.character}  {kind.meaning}"))
            y += ROW
        for text in texts:
            y += ROW
            shapes.append(_text(8, y, text))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(self.title)}" width="{width}"'
            f' height="{y + 16}" font-family="ui-monospace, monospace" font-size="{FONT}" style="background:#fff">'
            f"{''.join(shapes)}</svg>"
        )


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 token", "2 tokens"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def to_html(title: str, bodies: Sequence[str]) -> str:
    """Return a whole page without references to other files. `bodies`: SVG or HTML, one per section."""
    sections = "\n".join(f"<section>{body}</section>" for body in bodies)
    return page(title, STYLE, sections)


def page(title: str, style: str, body: str) -> str:
    """Return one file of HTML that begins with its title as the heading. `style`: CSS; `body`: HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> str:
    """Return a table. `numbers`: the columns whose cells have the class "number"."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        "<tr>" + "".join(_cell(cell, is_number=at in numbers) for at, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str, *, is_number: bool) -> str:
    return f'<td class="number">{escape(text)}</td>' if is_number else f"<td>{escape(text)}</td>"


def _text(x: int, y: int, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}" fill="#111" xml:space="preserve">{escape(text)}</text>'
