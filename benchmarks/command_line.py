"""Options, tables and result files that benchmarks share."""

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.runtime.hardware import count_threads, read_cpu_info

RESULTS = Path(__file__).parent / "results"
PEERS = (("parent", "PARENT"), ("llama-cpp", "LLAMA_CPP"), ("ik-llama-cpp", "IK_LLAMA_CPP"), ("vllm", "VLLM"))

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"default": "smollm2", "help": "alias or GGUF file  [%(default)s]"},
    "threads": {"type": int, "default": count_threads(), "help": "[physical cores]"},
    "repetitions": {"type": int, "default": 5, "help": "turns of each side  [%(default)s]"},
    "json": {"action": "store_true", "help": "print a JSON object per row instead of a table"},
}


def make_parser(doc: str | None, *options: str) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring, with some of `OPTIONS`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in options:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    return parser


class Table:
    """Rows that are printed as they are known: aligned below their titles, or as JSON objects."""

    def __init__(self, formats: Mapping[str, str], *, as_json: bool = False) -> None:
        """`formats`: title → format of its values, such as ".1f"; none for text."""
        self._formats, self._as_json = formats, as_json
        if not as_json:
            self._line(list(formats))

    def row(self, *values: Any) -> None:
        """Print a row; None is no value."""
        if self._as_json:
            print(json.dumps(dict(zip(self._formats, values, strict=True))), flush=True)
        else:
            pairs = zip(values, self._formats.values(), strict=True)
            self._line(["–" if value is None else format(value, form) for value, form in pairs])

    def _line(self, cells: Sequence[str]) -> None:
        columns = zip(cells, self._formats.items(), strict=True)
        aligned = [cell.rjust(max(len(title), 7)) if form else cell.ljust(24) for cell, (title, form) in columns]
        print("  ".join(aligned).rstrip(), flush=True)


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
