"""Seconds to the first token of a long prompt: cold, and after a restart that finds its KV blocks on disk.

    python -m benchmarks.tiers [--model smollm2] [--tokens 2000] [--repetitions 5] [--threads 2]

Each measurement is a process of its own that has computed one other prompt before. Sides take turns: without a disk
tier; with an empty directory, which is written at the end; restarted on that directory. Files are in the page cache.
Prints medians, the ratios to the first side, and exits with 6 if the restarted side takes more than a quarter.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.command_line import Table, cpu_name, make_parser
from quire.engine.llm_engine import LLMEngine
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

LIMIT = 0.25
SIDES = ("cold", "cold, disk tier", "restarted")


def first_token_s(engine: LLMEngine, name: str, token_ids: list[int]) -> tuple[float, int]:
    """Return seconds from the request to its first token, and the cached tokens."""
    started = time.perf_counter()
    engine.add_request(name, token_ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    found: list[Any] = []
    while not found:
        found = engine.step()
    assert isinstance(found[0], RequestOutput)
    return time.perf_counter() - started, found[0].num_cached_tokens or 0


def measure(model: str, num_tokens: int, directory: str) -> None:
    """Measure in this process and print the result as JSON."""
    engine = LLMEngine.from_options(model, max_num_seqs=16, **({"kv_disk": directory} if directory else {}))
    vocab_size = engine.config.model.vocab_size
    first_token_s(engine, "warm-up", [5] * 512)
    seconds, num_cached = first_token_s(
        engine, "measured", [(7 * i * i + 3 * i) % vocab_size for i in range(num_tokens)]
    )
    started = time.perf_counter()
    engine.shutdown()
    print(json.dumps({"seconds": seconds, "num_cached": num_cached, "shutdown_s": time.perf_counter() - started}))


def main() -> int:
    """Print a row per side."""
    parser = make_parser(__doc__, "model", "repetitions", "threads", "json")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.model, arguments.tokens, arguments.measure)
        return 0
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(arguments.repetitions):
        with tempfile.TemporaryDirectory() as directory:
            for side, place in zip(SIDES, ("", directory, directory), strict=True):
                command = [sys.executable, "-m", "benchmarks.tiers", "--model", arguments.model, "--measure", place]
                command += ["--tokens", str(arguments.tokens)]
                environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
                run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
                found[side].append(json.loads(run.stdout))
    medians = {side: statistics.median(item["seconds"] for item in items) for side, items in found.items()}
    formats = {cpu_name(): "", "ms": ".1f", "cold ×": ".3f", "cached tokens": "d", "shutdown ms": ".0f"}
    table = Table(formats, as_json=arguments.json)
    for side, items in found.items():
        shutdown_s = statistics.median(item["shutdown_s"] for item in items)
        ratio = medians[side] / medians["cold"]
        table.row(side, 1000 * medians[side], ratio, items[0]["num_cached"], 1000 * shutdown_s)
    return 0 if medians["restarted"] <= LIMIT * medians["cold"] else 6


if __name__ == "__main__":
    sys.exit(main())
