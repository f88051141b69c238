"""The sampler of a device plan: tokens of its kernels and of its reference, and what it leaves to the host."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from quire.runtime.batch import RequestState
from quire.runtime.device.sampler import HostRowSampler
from quire.sampling.native import NativeRowSampler
from quire.sampling.sampler import Sampler
from tests.sampling.builders import gaussian, new_request, params


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_kernels_choose_the_tokens_of_the_cpu_sampler() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.runtime.device.interpreted_rows"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    kinds = ("greedy", "plain", "min_p", "top_k", "top_p", "both", "all")
    assert sum(seen[kind] for kind in kinds) > 200
    assert min(seen[kind] for kind in (*kinds, "no choice", "overflow")) >= 5, seen


def make_reference(vocab_size: int, logits: torch.Tensor) -> tuple[Sampler, HostRowSampler, torch.Tensor]:
    sampler, last_tokens = Sampler(vocab_size, "cpu"), torch.full((4,), -7, dtype=torch.int32)
    assert isinstance(sampler.rows, NativeRowSampler)
    plan: Any = SimpleNamespace(logits=logits, step=SimpleNamespace(last_tokens=last_tokens))
    return sampler, HostRowSampler(plan, sampler.rows), last_tokens


def test_siblings_share_a_row_of_logits_and_draw_by_their_own_seeds() -> None:
    sampler, device, last_tokens = make_reference(50, gaussian(3, 50, scale=0.1))
    news = [new_request(str(seed), params(temperature=1.0), seed=seed) for seed in range(3)]
    states = [RequestState(new, row, 1, sampling=sampler.start(new)) for new, row in zip(news, (2, 0, 3), strict=True)]
    for state in states:
        device.add(state)
    rows, positions = np.array([2, 0, 3], np.int32), np.array([9, 9, 9], np.int32)
    found = device.launch(rows, positions, [1, 1, 1], [state.sampling for state in states if state.sampling]).tolist()
    assert len(set(found)) == 3
    assert last_tokens.tolist() == [found[1], -7, found[0], found[2]]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"top_k": 513},
        {"typical_p": 0.5},
        {"logits_processors": [lambda ids, logits: logits]},
    ],
)
def test_requests_that_change_logits_are_left_to_the_host(fields: dict[str, Any]) -> None:
    sampler, device, _ = make_reference(1000, gaussian(1, 1000))
    for row, sampling in enumerate((params(), params(**fields))):
        new = new_request(str(row), sampling)
        device.add(RequestState(new, row, 1, sampling=sampler.start(new)))
    rows, positions = np.arange(2, dtype=np.int32), np.full(2, 5, np.int32)
    assert device.takes(rows[:1], positions[:1])
    assert not device.takes(rows, positions)


def test_bans_of_min_tokens_are_the_hosts_until_they_end() -> None:
    sampler, device, _ = make_reference(50, gaussian(1, 50))
    new = new_request(sampling=params(min_tokens=3), prompt=(1, 2), eos=(4,))
    device.add(RequestState(new, 0, 2, sampling=sampler.start(new)))
    found = [device.takes(np.zeros(1, np.int32), np.array([position], np.int32)) for position in range(2, 7)]
    assert found == [False, False, False, True, True]
