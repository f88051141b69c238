"""`quire compare`: table, JSON, page, and one-line errors."""

from pathlib import Path
from xml.etree import ElementTree

from quire_lessons import compare
from quire_lessons.cli.compare import COMPARISONS
from tests.cli.command_line import call, parsed

SMALL = ("--requests", "6", "--slots", "2", "--context", "64")


def test_verb_offers_every_comparison() -> None:
    assert tuple(compare.COMPARISONS) == COMPARISONS


def test_json_has_settings_table_charts_and_explanation() -> None:
    value = parsed(call("compare", "batching", *SMALL, "--json"))
    assert value["schema"] == "quire.compare/1"
    assert value["outputs_equal"] == value["settings"]["requests"] == 6
    assert [row[0].split()[0] for row in value["rows"]] == ["static", "dynamic", "continuous"]
    assert len(value["explanation"]) == len(value["charts"]) == 3


def test_table_is_on_stdout_and_stages_on_stderr(tmp_path: Path) -> None:
    page, image = tmp_path / "kv.html", tmp_path / "kv.svg"
    result = call("compare", "kv", *SMALL, "--pool", "12MiB", "--html", str(page), "--svg", str(image))
    assert result.exit_code == 0, result.stderr
    assert "requests with equal outputs in all modes: 6 of 6" in result.stdout
    assert "buddy (power of two)" in result.stdout
    assert "kv: contiguous" in result.stderr
    assert page.read_text().startswith("<!doctype html>")
    titles = [text.text for text in ElementTree.parse(image).iter() if text.get("font-weight") == "bold"]
    assert titles
    assert all(title in page.read_text() for title in titles if title)
