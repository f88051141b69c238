"""Tokens of the sampler's kernels in Triton's interpreter, beside those of the CPU's sampler on the same logits.

A process of its own (`TRITON_INTERPRET=1 python -m tests.runtime.device.interpreted_rows`): how kernels run is decided
when they are imported. Prints what kinds of rows were equal, as JSON.
"""

import json
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.runtime.batch import RequestState
from quire.runtime.device.sampler import MAX_K, TritonRowSampler
from quire.sampling.native import NativeRowSampler
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from tests.sampling.builders import new_request

NUM_ROWS = 5
SIZES = {300: 150, 1500: 50, 5000: 5}
"""Vocabulary → rows; of 1500 tokens, top_k=200 finds more than the pool holds."""


def random_params(rng: random.Random) -> tuple[str, SamplingParams]:
    kind = rng.choice(["greedy", "plain", "min_p", "top_k", "top_p", "both", "all"])
    fields: dict[str, Any] = {"temperature": 0.0 if kind == "greedy" else rng.choice([0.3, 0.6, 1.0, 1.7])}
    if kind in ("min_p", "all"):
        fields["min_p"] = rng.choice([0.01, 0.1])
    if kind in ("top_p", "both", "all"):
        fields["top_p"] = rng.choice([0.1, 0.5, 0.9, 0.95, 0.999])
    if kind in ("top_k", "both", "all"):
        fields["top_k"] = rng.choice([1, 5, 20, 64, 200, MAX_K])
    return kind, SamplingParams(**fields)


def random_logits(rng: random.Random, vocab_size: int) -> tuple[str, NDArray[np.float32]]:
    kind = rng.choice(["peaked", "normal", "flat", "ties", "equal", "holes", "infinite", "nan", "none"])
    x = np.random.default_rng(rng.getrandbits(32)).standard_normal(vocab_size).astype(np.float32)
    x *= {"peaked": 4, "flat": 0.05, "equal": 0}.get(kind, 1.5)
    if kind == "ties":
        x = np.round(x * 2) / 2
    elif kind == "holes":
        x[np.random.default_rng(rng.getrandbits(32)).random(vocab_size) < 0.97] = -np.inf
    elif kind == "infinite":
        x[rng.randrange(vocab_size)] = np.inf
    elif kind == "nan":
        x[rng.randrange(vocab_size)] = np.nan
    elif kind == "none":
        x[:] = -np.inf
    if kind == "peaked":
        x[:3] = -0.0
    return kind, x


def check_rows(rng: random.Random, vocab_size: int, seen: Counter[str]) -> None:
    """Sample some rows both ways; requests share rows of logits, as siblings do. Mutates: seen."""
    sampler = Sampler(vocab_size, "cpu")
    kinds, values = zip(*(random_logits(rng, vocab_size) for _ in range(NUM_ROWS)), strict=True)
    logits = torch.from_numpy(np.stack(values))
    step = SimpleNamespace(last_tokens=torch.full((NUM_ROWS + 1,), -7, dtype=torch.int32))
    device = TritonRowSampler(SimpleNamespace(logits=logits, step=step), None)  # type: ignore[arg-type]
    index = [rng.randrange(NUM_ROWS) for _ in range(NUM_ROWS)] if rng.random() < 0.5 else None
    rows = np.array(rng.sample(range(NUM_ROWS + 1), NUM_ROWS), np.int32)
    positions = np.array([rng.randrange(1, 100_000) for _ in rows], np.int32)
    states, names = [], []
    for row in rows.tolist():
        name, params = random_params(rng)
        new = new_request(sampling=params, seed=rng.getrandbits(64))
        state = RequestState(new, row, len(new.token_ids), sampling=sampler.start(new))
        assert state.sampling is not None
        device.add(state)
        states.append(state.sampling)
        names.append(name)
    assert device.takes(rows, positions)
    found = device.launch(rows, positions, index, states)
    assert isinstance(sampler.rows, NativeRowSampler)
    used = list(range(NUM_ROWS)) if index is None else index
    expected = sampler.rows.sample_at(logits.numpy()[used], states, positions.tolist())
    assert found.tolist() == expected.tolist(), (vocab_size, [kinds[at] for at in used], names, found, expected)
    assert step.last_tokens[torch.from_numpy(rows).long()].tolist() == found.tolist()
    assert (step.last_tokens == -7).sum() == 1, "the row without a request is left alone"
    seen.update(names)
    seen["no choice"] += sum(token < 0 for token in found.tolist())
    limited = [state.params.top_k > 0 or state.params.top_p < 1 for state in states]
    seen["overflow"] += sum(
        is_limited and kinds[at] not in ("nan", "none", "infinite") and pooled > device._kernels.POOL
        for is_limited, at, pooled in zip(limited, used, device._num_pooled.tolist(), strict=False)
    )


if __name__ == "__main__":
    counts = Counter[str]()
    numbers = random.Random(1)
    for vocab, num_rows in SIZES.items():
        for _ in range(num_rows // NUM_ROWS):
            check_rows(numbers, vocab, counts)
    print(json.dumps(counts))
