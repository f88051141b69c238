"""Options and result files that `peers.py`, `quality.py` and `served.py` share."""

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.runtime.hardware import count_threads, read_cpu_info

RESULTS = Path(__file__).parent / "results"
PEERS = (("parent", "PARENT"), ("llama-cpp", "LLAMA_CPP"), ("ik-llama-cpp", "IK_LLAMA_CPP"), ("vllm", "VLLM"))


def add_shared_options(parser: argparse.ArgumentParser, sides: Sequence[str], *, what: str) -> None:
    """Model, sides, their interpreters, threads and results."""
    parser.add_argument(
        "--model", default="smollm2", help="alias, GGUF file, or random weights as qwen3-1.7b:Q4_K_M  [smollm2]"
    )
    parser.add_argument("--bf16", type=Path, help="bf16 directory of the model  [made from the GGUF file]")
    parser.add_argument(
        "--sides", "--peers", default=",".join(sides),
        help="separated by commas, with options after colons (llama.cpp:kv=q8_0, quire:env.QUIRE_ISA=avx2, "
        "quire:model=bf16); ratios are those of the first  [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=count_threads(), help="[physical cores]")
    for peer, variable in PEERS:
        parser.add_argument(
            f"--{peer}-python", default=os.environ.get(f"QUIRE_BENCH_{variable}"),
            help=f"interpreter that has it  [$QUIRE_BENCH_{variable}]",
        )  # fmt: skip
    parser.add_argument("--json", type=Path, help="file to write  [benchmarks/results/DATE-CPU-WHAT.json]")
    parser.add_argument("--what", default=what, help="last part of that name  [%(default)s]")


def finish_arguments(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with `sides` as a list."""
    arguments = parser.parse_args(words)
    arguments.sides = [name for name in arguments.sides.split(",") if name]
    if not arguments.sides:
        parser.error("--sides is empty")
    return arguments


def cpu_name() -> str:
    """Return the CPU's name."""
    return read_cpu_info().name or "unknown CPU"


def write_result(value: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write JSON where the options say, and name the file."""
    cpu = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    path = arguments.json or RESULTS / f"{datetime.date.today().isoformat()}-{cpu}-{arguments.what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)
