"""The HTML page: well-formed, complete, and without references to anything outside."""

import re
from xml.etree import ElementTree

import pytest

from quire_lessons.compare import run
from quire_lessons.compare.results import MAX_POINTS, Comparison, RunSettings, cell_text, html_page, thinned


@pytest.fixture(scope="module", params=["batching", "kv", "cache", "attention"])
def comparison(request: pytest.FixtureRequest) -> Comparison:
    model = None if request.param == "attention" else "fake"
    return run(request.param, RunSettings(model=model, requests=6, context=64, slots=2))


def test_page_has_charts_and_no_outside_reference(comparison: Comparison) -> None:
    page = html_page(comparison)
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|src=|href=|url\(|@import|<script", page)
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    (drawing,) = drawings
    root = ElementTree.fromstring(drawing)
    assert root.attrib["aria-label"]
    charts = [[item.tag.rpartition("}")[2] for item in chart.iter()] for chart in root if chart.tag.endswith("}g")]
    assert len(charts) == len(comparison.charts)
    assert all("polyline" in chart or "rect" in chart for chart in charts)
    assert "nan" not in drawing
    for row in comparison.rows:
        assert row[0] in page


def test_cells_are_written_in_their_unit() -> None:
    cases = [(0.5, "share"), (2**20, "bytes"), (0.0123, "seconds"), (2.5, "seconds"), (None, "bytes"), (7.0, "steps")]
    assert [cell_text(*case) for case in cases] == ["50.0%", "1 MiB", "12.3 ms", "2.50 s", "–", "7"]


def test_long_lines_keep_their_ends_and_short_ones_every_point() -> None:
    for count in (0, 1, MAX_POINTS, MAX_POINTS + 1, 1_000_003):
        points = [(float(at), 1.0) for at in range(count)]
        found = thinned(points)
        assert len(found) <= MAX_POINTS + 1
        assert found[:1] + found[-1:] == (*points[:1], *points[-1:])
        assert (found == tuple(points)) == (count <= MAX_POINTS)
