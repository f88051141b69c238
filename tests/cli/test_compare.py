"""`quire compare`: table, JSON, page, and one-line errors."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.cli.compare import COMPARISONS
from quire.errors import ComparisonError
from quire.insight import compare
from quire.insight.compare import batching
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


def test_different_outputs_exit_with_6(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(*arguments: object) -> int:
        raise ComparisonError("request 1 got different tokens")

    monkeypatch.setattr(batching, "check_outputs_equal", differ)
    result = call("compare", "batching", *SMALL)
    assert result.exit_code == 6
    assert result.stderr.splitlines()[-1] == "error[outputs_differ]: request 1 got different tokens"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "named"),
    [
        (("nothing",), 2, "'cache', 'batching', 'kv', 'attention'"),
        (("batching", "--rate", "-1"), 2, "rate=-1.0"),
        (("batching", "--requests", "0"), 2, "requests=0"),
        (("kv", "--context", "100"), 2, "not a power of two"),
        (("kv", "--pool", "1MiB"), 4, "the KV cache has 2 blocks (720 KiB): --pool 47554560 fits"),
        (("kv", "--context", "256K"), 2, "context=262144"),
        (("batching", "--model", "no-such-model"), 3, "no-such-model"),
        (("batching", *SMALL, "--html", "missing/x.html"), 2, "--html missing/x.html cannot be written"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], exit_code: int, named: str) -> None:
    result = call("compare", *arguments, "--quiet")
    assert result.exit_code == exit_code, result.stderr
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
