"""Engines of one server: share of prompt tokens found in the prefix caches, and tokens per second, on one trace.

    python -m benchmarks.engines [--engines 2] [--requests 400] [--prompts 200] [--exponent 0.7] [--beside CHECKOUT]

Each request has one of `--prompts` system prompts, chosen with probability 1 / rank^exponent (Zipf), and a question of
its own. The KV memory of all engines together holds about a quarter of the prompts. With `--beside`, the server of
another checkout of Quire gets the same requests in turns with this one's. `ideal` is the hit rate of one LRU
cache of the same total size, for whole prompts one after another: a bound for what placement can reach.
Results: `README.md`.
"""

import argparse
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import psutil

from benchmarks.command_line import Table, make_parser
from benchmarks.server_process import ServerProcess, quire_serve
from quire_workshop.cli.bench_serve import WORDS
from quire_workshop.load_client import Load, LoadResult, LoadTarget, put_load

BLOCK_TOKENS = 32
QUESTION_WORDS = 8


class Trace:
    """The requests: which system prompt each has, and its body."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        choose = random.Random(arguments.seed)
        prompts = [
            f"You are assistant number {index}. " + " ".join(choose.choices(WORDS, k=arguments.words))
            for index in range(arguments.prompts)
        ]
        weights = [1 / rank**arguments.exponent for rank in range(1, arguments.prompts + 1)]
        self.chosen = choose.choices(range(arguments.prompts), weights, k=arguments.requests)
        self.bodies = [
            {
                "model": "bench", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
                "max_tokens": arguments.generate, "ignore_eos": True,
                "messages": [
                    {"role": "system", "content": prompts[index]},
                    {"role": "user", "content": " ".join(choose.choices(WORDS, k=QUESTION_WORDS))},
                ],
            }
            for index in self.chosen
        ]  # fmt: skip

    def ideal(self, num_prompts: int) -> float:
        """Return the hit rate of one LRU cache of `num_prompts` prompts."""
        cache: OrderedDict[int, None] = OrderedDict()
        num_hits = 0
        for index in self.chosen:
            num_hits += index in cache
            cache[index] = None
            cache.move_to_end(index)
            if len(cache) > num_prompts:
                cache.popitem(last=False)
        return num_hits / len(self.chosen)


def processor_s(pid: int) -> float:
    """Return the processor time of a process and all its descendants."""
    process = psutil.Process(pid)
    times = [item.cpu_times() for item in (process, *process.children(recursive=True))]
    return sum(item.user + item.system for item in times)


def measure(sides: Mapping[str, str | None], trace: Trace, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start a server of each side, let them answer the trace in turns, and return a row for each.

    `sides`: by name the checkout; None: this one. While one side answers, the others are idle.
    """
    load = Load(concurrency=arguments.clients)
    results: dict[str, list[LoadResult]] = {side: [] for side in sides}
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for side, checkout in sides.items():
            servers[side] = ServerProcess(command_of(checkout, arguments))
            stack.callback(servers[side].kill)
        before_s = {side: processor_s(server.process.pid) for side, server in servers.items()}
        order = list(sides)
        for start in range(0, len(trace.bodies), arguments.turn):
            for side in order:
                endpoint = LoadTarget(servers[side].url, "/v1/chat/completions")
                results[side].append(put_load(endpoint, load, trace.bodies[start : start + arguments.turn]))
            order.reverse()
        used_s = {side: processor_s(server.process.pid) - before_s[side] for side, server in servers.items()}
    rows = []
    for side, turns in results.items():
        answers = tuple(answer for turn in turns for answer in turn.answers)
        result = LoadResult(load, answers, sum(turn.duration_s for turn in turns))
        prompt_tokens = sum(answer.num_prompt_tokens for answer in result.good)
        hits = sum(answer.num_cached_tokens for answer in result.good)
        rows.append({
            "side": side,
            "answers": len(result.good),
            "prompt_tokens": prompt_tokens,
            "hit_rate": hits / max(1, prompt_tokens),
            "generated_tokens_per_s": result.tokens_per_s,
            "prompt_tokens_per_s": prompt_tokens / result.duration_s,
            "processor_s": used_s[side],
            **{f"ttft_p{percent}_ms": result.percentile_ms("ttft", percent) for percent in (50, 95)},
        })  # fmt: skip
    return rows


def command_of(checkout: str | None, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a server."""
    command = quire_serve(
        arguments.model, "--data-parallel-size", str(arguments.engines),
        "--num-blocks-override", str(arguments.blocks * arguments.engines), "--max-model-len", "1024", name="bench",
    )  # fmt: skip
    return command if checkout is None else [f"{checkout}/.venv/bin/python", *command[1:]]


FORMATS = {
    "side": "", "answers": "d", "prompt_tokens": ".0f", "hit_rate": ".3f", "generated_tokens_per_s": ".0f",
    "prompt_tokens_per_s": ".0f", "processor_s": ".2f", "ttft_p50_ms": ".0f", "ttft_p95_ms": ".0f",
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    parser = make_parser(__doc__, "model", "json")
    parser.add_argument("--beside", metavar="CHECKOUT", help="another checkout of Quire, with its .venv")
    parser.add_argument("--turn", type=int, default=40, help="requests after which sides change  [%(default)s]")
    parser.add_argument("--engines", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--requests", type=int, default=400, help="[%(default)s]")
    parser.add_argument("--prompts", type=int, default=200, help="system prompts  [%(default)s]")
    parser.add_argument("--exponent", type=float, default=0.7, help="of their popularity  [%(default)s]")
    parser.add_argument("--words", type=int, default=200, help="of a system prompt  [%(default)s]")
    parser.add_argument("--generate", type=int, default=16, help="tokens per answer  [%(default)s]")
    parser.add_argument("--blocks", type=int, default=200, help="KV blocks of an engine, 32 tokens each  [%(default)s]")
    parser.add_argument("--clients", type=int, default=8, help="at once  [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    arguments = parser.parse_args(words)
    trace = Trace(arguments)
    table, num_tokens = Table(FORMATS, as_json=arguments.json), 0.0
    sides = {"this": None, **({} if arguments.beside is None else {"other": arguments.beside})}
    for row in measure(sides, trace, arguments):
        num_tokens = row["prompt_tokens"] / row["answers"]
        table.row(*row.values())
    if not arguments.json and num_tokens:
        blocks_each = num_tokens // BLOCK_TOKENS + 1
        num_held = int(arguments.engines * (arguments.blocks - arguments.clients * blocks_each) // blocks_each)
        print(f"ideal: one cache of {num_held} prompts hits {trace.ideal(max(1, num_held)):.3f} of the requests")


if __name__ == "__main__":
    main()
