"""Tokens from rows of logits: microseconds per row of the native sampler beside PyTorch's, in one run.

    python -m benchmarks.kernels.sampling [--vocab 49152] [--rows 32] [--threads 2] [--isa avx2] [--no-torch] [--json]

"peaked" rows are like a language model's: a few tokens have most of the probability. In "flat" ones, normally
distributed, top_p keeps thousands. "native" is CPU time on one thread, requests and results in Python included;
"row" that of a single row, which costs what a step costs beside; "spread" wall time on the threads; "torch" wall time
of the PyTorch sampler on as many. The shortest of several runs counts.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quire import _native
from quire.sampling.native import NativeRowSampler
from quire.sampling.reference import ReferenceRowSampler
from quire.sampling.rows import RowSampler
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.types import NewRequest

SECONDS = 0.3
"""Spent on each figure."""
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "temperature": {"temperature": 0.8},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 1000": {"temperature": 0.8, "top_k": 1000},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "all, penalties": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "temperature 1, 5 logprobs": {"logprobs": 5},
    "top_k 50, 5 logprobs": {"temperature": 0.8, "top_k": 50, "logprobs": 5},
    "top_p 0.9, 5 logprobs": {"temperature": 0.8, "top_p": 0.9, "logprobs": 5},
}


@dataclass(frozen=True)
class Figure:
    """Microseconds per row."""

    case: str
    logits: str
    native: float
    row: float
    spread: float
    torch: float | None


def peaked(num_rows: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2.5
    places = torch.randint(0, vocab_size, (num_rows, 40), generator=generator)
    values = 12 - torch.arange(40) * 0.25 + torch.randn(num_rows, 40, generator=generator)
    return logits.scatter_(1, places, values)


def flat(num_rows: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


def shortest(run: Callable[[], object], clock: Callable[[], float]) -> float:
    best, end, count = float("inf"), time.perf_counter() + SECONDS, 0
    while count < 3 or time.perf_counter() < end:
        start = clock()
        run()
        best = min(best, clock() - start)
        count += 1
    return best


def sampler_of(rows: RowSampler, logits: torch.Tensor, fields: dict[str, Any]) -> Callable[[int], object]:
    """A function that samples for the first few rows."""
    sampler = Sampler(logits.shape[1], torch.device("cpu"))
    sampler.rows = rows
    params = SamplingParams(max_tokens=None, **fields)
    prompt = tuple(range(0, 600, 3))
    ids = [str(row) for row in range(len(logits))]
    for row, request_id in enumerate(ids):
        sampler.add_request(NewRequest(request_id, prompt, len(prompt), params, None, (0,), seed=row))
    changes = isinstance(rows, ReferenceRowSampler)  # it writes over logits that are its own in the engine
    return lambda count: sampler.sample(logits[:count].clone() if changes else logits[:count], ids[:count])


def figure(case: str, kind: str, logits: torch.Tensor, threads: int, *, with_torch: bool) -> Figure:
    count, vocab_size, fields = len(logits), logits.shape[1], CASES[case]
    alone = sampler_of(NativeRowSampler(vocab_size), logits, fields)
    spread = sampler_of(NativeRowSampler(vocab_size, _native.ThreadPool(threads)), logits, fields)
    torchs = sampler_of(ReferenceRowSampler(), logits, fields)
    return Figure(
        case,
        kind,
        shortest(lambda: alone(count), time.thread_time) / count * 1e6,
        shortest(lambda: alone(1), time.thread_time) * 1e6,
        shortest(lambda: spread(count), time.perf_counter) / count * 1e6,
        shortest(lambda: torchs(count), time.perf_counter) / count * 1e6 if with_torch else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=_native.isa())
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _native.set_isa(arguments.isa)
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    if not arguments.json:
        print(f"{arguments.rows} rows of {arguments.vocab}, {_native.isa()}, {arguments.threads} threads; µs per row")
        print(f"{'':28} logits  native     row  spread    torch  torch / spread")
    figures = []
    for kind, make in (("peaked", peaked), ("flat", flat)):
        logits = make(arguments.rows, arguments.vocab, generator)
        for case in CASES:
            found = figure(case, kind, logits, arguments.threads, with_torch=not arguments.no_torch)
            figures.append(found)
            if not arguments.json:
                line = f"{case:28} {kind:6} {found.native:7.1f} {found.row:7.1f} {found.spread:7.1f}"
                if found.torch is not None:
                    line += f" {found.torch:8.0f} {found.torch / found.spread:11.0f}"
                print(line, flush=True)
    if arguments.json:
        print(json.dumps({**vars(arguments), "isa": _native.isa(), "figures": [asdict(found) for found in figures]}))


if __name__ == "__main__":
    main()
