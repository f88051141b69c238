"""The table of servers: turns, shares, a side that fails, what is skipped. Sides are stand-ins."""

import argparse
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from benchmarks import served
from benchmarks.served import Report, line, measure_case
from quire.cli.load_client import Load, LoadResult
from quire.cli.server_client import Answer


class StandIn:
    """A side of a given speed: each answer has 3 tokens, the first after a second, the others half a second apart."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, log: list[str], *, duration_s: float = 1.0, fails_at: int = -1) -> None:
        self.name, self._log, self._duration_s, self._left = name, log, duration_s, fails_at
        self.is_paused = False

    def measure(self, num_clients: int, bodies: Sequence[Any]) -> LoadResult:
        assert not self.is_paused
        if self._left == 0:
            raise RuntimeError("it fell over")
        self._left -= 1
        self._log.append(self.name)
        answers = [Answer(0.0, chunk_times=[1.0, 1.5, 2.0], ended_s=2.0, num_tokens=3) for _ in bodies]
        return LoadResult(Load(concurrency=num_clients), tuple(answers), self._duration_s)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


def test_sides_take_turns_beginning_with_another_and_the_rest_stands_still() -> None:
    log: list[str] = []
    sides = [StandIn(name, log) for name in "abc"]
    measure_case(sides, 1, [[{}], [{}]], Report())  # type: ignore[arg-type]
    assert log == ["a", "b", "c", "b", "c", "a"]
    assert all(side.is_paused for side in sides)


def test_shares_ratios_and_percentiles() -> None:
    log: list[str] = []
    sides = [
        StandIn("offline", log),
        StandIn("quire serve", log, duration_s=2),
        StandIn("llama.cpp", log, duration_s=8),
    ]
    report = Report()
    measure_case(sides, 8, [[{}] * 8], report)  # type: ignore[arg-type]
    assert [(row["side"], row["tokens_per_s"], row["share"], row["quire_ratio"]) for row in report.rows] == [
        ("offline", [24.0], 1.0, 0.5), ("quire serve", [12.0], 0.5, 1.0), ("llama.cpp", [3.0], 0.125, 4.0),
    ]  # fmt: skip
    for row in report.rows:
        assert row["ttft_ms"] == {"p50": 1000, "p95": 1000, "p99": 1000}
        assert row["itl_ms"]["p50"] == 500
    words = line(report.rows[2]).replace(" / ", "/").split()
    assert words == ["8", "llama.cpp", "3", "12", "%", "4.00", "1000/1000/1000", "500.0/500.0/500.0"]


def test_a_side_that_fails_leaves_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    sides = [StandIn("offline", log), StandIn("vllm", log, fails_at=1)]
    report = Report()
    measure_case(sides, 1, [[{}]] * 3, report)  # type: ignore[arg-type]
    assert [side.name for side in sides] == ["offline"]
    assert [row["side"] for row in report.rows] == ["offline"]
    assert report.rows[0]["quire_ratio"] is None
    assert report.skipped == [{"name": "vllm", "reason": "it fell over"}]
    assert "without vllm: it fell over" in capsys.readouterr().err


def test_peers_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "Offline", lambda model: StandIn("offline", []))
    arguments = argparse.Namespace(
        model="tiny", sides=["llama.cpp", "exllama"], clients="1,2", turns=1, requests=1, words=3, generate=4,
        threads=1, llama_cpp_python=None,
    )  # fmt: skip
    found = served.run(arguments)
    assert [(item["name"], item["reason"].split()[0]) for item in found["skipped"]] == [
        ("llama.cpp", "set"), ("exllama", "there"),
    ]  # fmt: skip
    assert [(row["clients"], row["side"]) for row in found["rows"]] == [(1, "offline"), (2, "offline")]
    assert found["idle_ttft_ms"] == {"offline": 1000}
