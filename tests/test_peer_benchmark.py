"""Settings of a peer in `benchmarks.peers`: which are tried, and which have the turns."""

from collections.abc import Mapping
from typing import Any, cast

import pytest

from benchmarks.peers import sweep_settings
from benchmarks.side_process import SideError, SideProcess
from quire.cli.bench_cases import BenchCase

CASE = BenchCase(num_prompt=8, num_generated=64, num_streams=2)


class FakeSide:
    """A peer whose speed is a function of its settings; 0: its process dies."""

    name, has_alternatives, answering_s, cpu_elsewhere_s = "fake", True, 1.0, 0.0

    def __init__(self, alternatives: list[dict[str, Any]], speed: Mapping[str, float]) -> None:
        self._alternatives, self._speed = alternatives, speed
        self.num_starts = 0
        self.asked_tokens: set[int] = set()

    def request(self, op: str, *, timeout_s: float, **values: Any) -> dict[str, Any]:
        if op == "alternatives":
            return {"alternatives": self._alternatives}
        self.answering_s += 1
        self.asked_tokens.add(values["num_generated"])
        speed = self._speed[",".join(f"{key}{value}" for key, value in values["settings"].items())]
        if not speed:
            raise SideError("ended")
        return {"seconds": 1.0, "tokens": speed, "token_ids": []}

    def ensure_running(self) -> None:
        self.num_starts += 1


def sweep(side: FakeSide) -> Any:
    return sweep_settings(cast(SideProcess, side), CASE, [[1], [2]], retries=0)


def test_faster_settings_stay_while_later_ones_are_tried() -> None:
    side = FakeSide([{"a": 1}, {"b": 1}, {"c": 1}], {"": 10, "a1": 12, "a1,b1": 11, "a1,c1": 15})
    found = sweep(side)
    assert found.settings == {"a": 1, "c": 1}
    assert [speed for _, speed in found.tried] == [10, 12, 11, 15]
    assert side.asked_tokens == {16}


def test_settings_that_end_a_peer_lose_and_it_starts_again() -> None:
    side = FakeSide([{"a": 1}, {"b": 1}], {"": 10, "a1": 0, "b1": 11})
    found = sweep(side)
    assert found.settings == {"b": 1}
    assert side.num_starts == 1


def test_peer_that_fails_with_its_usual_settings_fails() -> None:
    with pytest.raises(SideError):
        sweep(FakeSide([{"a": 1}], {"": 0, "a1": 5}))


def test_side_without_alternatives_is_not_measured() -> None:
    side = FakeSide([], {})
    side.has_alternatives = False
    assert sweep(side).settings == {}
    assert not side.asked_tokens
