"""Slices of `torch.profiler` on the clock of the engine's events."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import record_function

from quire.insight import torch_profile
from quire.insight.torch_profile import CLOCK, TorchProfile


def test_a_wait_while_clocks_are_compared_moves_no_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s = iter([0.2])

    @contextmanager
    def slow_at_first(name: str) -> Iterator[None]:
        time.sleep(next(waits_s, 0.0))
        with record_function(name):
            yield

    monkeypatch.setattr(torch_profile, "record_function", slow_at_first)
    with TorchProfile() as profile:
        start_s = time.monotonic()
        torch.ones(3).neg()
        end_s = time.monotonic()
    slices = json.loads(profile.line())["slices"]
    assert {name for _, name, *_ in slices} >= {"aten::neg"}
    assert CLOCK not in {name for _, name, *_ in slices}
    assert all(start_s - 0.05 <= at_s <= end_s + 0.05 for _, name, at_s, _ in slices if name == "aten::neg")
