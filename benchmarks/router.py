"""Policies of the router: share of prompt tokens found in the prefix caches, and tokens per second, on one trace.

    python -m benchmarks.router [--replicas 2] [--requests 400] [--prompts 200] [--exponent 0.7]

Each request has one of `--prompts` system prompts, chosen with probability 1 / rank^exponent (Zipf), and a question of
its own. The replicas' KV memory holds about a quarter of the prompts, of all replicas together. Each policy gets a
server of its own and the same requests. `ideal` is the hit rate of one LRU cache of the same total size, for whole
prompts one after another: a bound for what placement can reach. Results: `README.md`.
"""

import argparse
import itertools
import random
import urllib.request
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.command_line import Table, make_parser
from benchmarks.server_process import ServerProcess, quire_serve
from quire.server.options import ROUTER_POLICIES
from quire_workshop.cli.bench_serve import WORDS
from quire_workshop.load_client import Load, LoadTarget, put_load

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
                "model": "bench", "stream": True, "temperature": 0,
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


def totals(url: str) -> dict[str, float]:
    """Return the router's counters, summed over the replicas."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    names = sorted(sample.name for sample in samples if sample.name.startswith("quire_router_"))
    grouped = itertools.groupby(names)
    return {name: sum(sample.value for sample in samples if sample.name == name) for name, _ in grouped}


def measure(policy: str, trace: Trace, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a server with this policy and send it the trace."""
    command = quire_serve(
        arguments.model, "--data-parallel-size", str(arguments.replicas), "--router-policy", policy,
        "--num-blocks-override", str(arguments.blocks * arguments.replicas), "--max-model-len", "1024", name="bench",
    )  # fmt: skip
    server = ServerProcess(command)
    try:
        endpoint = LoadTarget(server.url, "/v1/chat/completions")
        result = put_load(endpoint, Load(concurrency=arguments.clients), trace.bodies)
        counted = totals(server.url)
    finally:
        server.kill()
    prompt_tokens, hits = (counted[f"quire_router_{name}_tokens_total"] for name in ("prompt", "hit"))
    return {
        "policy": policy,
        "answers": len(result.good),
        "prompt_tokens": prompt_tokens,
        "hit_rate": hits / prompt_tokens,
        "generated_tokens_per_s": result.tokens_per_s,
        "prompt_tokens_per_s": prompt_tokens / result.duration_s,
        **{f"ttft_p{percent}_ms": result.percentile_ms("ttft", percent) for percent in (50, 95)},
    }


FORMATS = {
    "policy": "", "answers": "d", "prompt_tokens": ".0f", "hit_rate": ".3f", "generated_tokens_per_s": ".0f",
    "prompt_tokens_per_s": ".0f", "ttft_p50_ms": ".0f", "ttft_p95_ms": ".0f",
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    parser = make_parser(__doc__, "model", "json")
    parser.add_argument("--policies", default=",".join(ROUTER_POLICIES), help="[%(default)s]")
    parser.add_argument("--replicas", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--requests", type=int, default=400, help="[%(default)s]")
    parser.add_argument("--prompts", type=int, default=200, help="system prompts  [%(default)s]")
    parser.add_argument("--exponent", type=float, default=0.7, help="of their popularity  [%(default)s]")
    parser.add_argument("--words", type=int, default=200, help="of a system prompt  [%(default)s]")
    parser.add_argument("--generate", type=int, default=16, help="tokens per answer  [%(default)s]")
    parser.add_argument("--blocks", type=int, default=200, help="KV blocks of a replica, 32 tokens each  [%(default)s]")
    parser.add_argument("--clients", type=int, default=8, help="at once  [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    arguments = parser.parse_args(words)
    trace = Trace(arguments)
    table, num_tokens = Table(FORMATS, as_json=arguments.json), 0.0
    for policy in arguments.policies.split(","):
        row = measure(policy, trace, arguments)
        num_tokens = row["prompt_tokens"] / row["answers"]
        table.row(*row.values())
    if not arguments.json and num_tokens:
        blocks_each = num_tokens // BLOCK_TOKENS + 1
        num_held = int(arguments.replicas * (arguments.blocks - arguments.clients * blocks_each) // blocks_each)
        print(f"ideal: one cache of {num_held} prompts hits {trace.ideal(max(1, num_held)):.3f} of the requests")


if __name__ == "__main__":
    main()
