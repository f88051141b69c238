"""The tables of loads and faults: rows, their numbers, and the command."""

import pytest

from benchmarks.soak import __main__ as soak
from benchmarks.soak.row import Row, at_percent, slope


def test_rows() -> None:
    row = Row("L9", "what")
    row.note("requests", 3)
    row.check("seconds", 0.12345, passes=True)
    assert row.passes
    assert row.cells() == ["L9", "what", "requests 3, seconds 0.123", "yes"]
    row.check("failed", 1, passes=False)
    assert not row.passes
    assert row.cells()[2:] == ["requests 3, seconds 0.123, failed 1 (!)", "NO"]


def test_percentiles() -> None:
    assert at_percent([], 99) == 0
    assert at_percent([3, 1, 2], 50) == 2
    assert at_percent(range(1, 101), 99) == 100


def test_slopes() -> None:
    assert slope([0, 1, 2], [5, 7, 9]) == pytest.approx(2)
    assert slope([1, 1], [0, 9]) == 0


def fake_checks(*failing: str) -> object:
    def check(row_id: str) -> object:
        async def measure() -> Row:
            if row_id == "F2":
                raise RuntimeError("it did not start")
            row = Row(row_id, "what")
            row.check("number", 1, passes=row_id not in failing)
            return row

        return measure

    return lambda arguments: {row_id: check(row_id) for row_id in ("L1", "L3", "F1", "F2")}


@pytest.mark.parametrize(
    ("words", "ids", "code"),
    [(["--only", "L"], ["L1", "L3"], 6), (["--only", "L1,F1"], ["L1", "F1"], 0), (["--only", "F"], ["F1", "F2"], 6)],
)
def test_the_table_and_its_exit_code(
    words: list[str], ids: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "checks", fake_checks("L3"))
    assert soak.main(words) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == ids
    assert all(("| NO |" in line) == (line[2:4] in ("L3", "F2")) for line in lines[2:])


def test_every_row_has_a_function() -> None:
    known = soak.checks(soak.argparse.Namespace(model="m", duration_s=1.0, seed=0, repeat=None, server_options=""))
    ranges = [("L", 9), ("F", 10), ("B", 10)]
    assert list(known) == [f"{table}{number}" for table, most in ranges for number in range(1, most + 1)]


def test_an_unknown_row(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--only", "L99"])
    assert "no such row: L99" in capsys.readouterr().err
