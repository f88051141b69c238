"""Cost of serving, beside peers' servers: the same closed loop of clients for all, by turns.

    python -m benchmarks.served [--sides quire,llama.cpp,vllm] [--clients 1,8,32] [--turns 3] [--generate 128]

The offline engine comes first: shares are of its speed. All sides answer the same conversations in closed loops.
Client, server and engine share the machine; servers that wait for their turn are stopped. Then, idle: time to the first
token of one request, and of Quire's first ten after a start. Missing peers are named with the reason.
Next to read: `served_sides.py`; results: `README.md`.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.command_line import Table, add_shared_options, cpu_name, finish_arguments, write_result
from benchmarks.served_sides import RECIPES, Body, Offline, Side, running
from benchmarks.side_specs import Skipped
from quire import __version__
from quire_workshop.cli.bench_serve import Bodies
from quire_workshop.load_client import LoadResult, percentile

PERCENTS = (50, 95, 99)
NUM_IDLE = 20
IDLE_TOKENS = 4
OURS = "quire serve"


class Report:
    """Turns per number of clients and side, to a table as they come and JSON in the end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []
        times = {f"{name} p{percent}": form for name, form in (("TTFT", ".0f"), ("ITL", ".1f")) for percent in PERCENTS}
        self._table = Table({
            "tokens/s, and ms": "", "clients": "d", "tok/s": ".0f", "of offline": ".0%", "Quire÷it": ".2f", **times,
        })  # fmt: skip

    def skip(self, name: str, reason: str) -> None:
        """A side takes no part, or no further."""
        self.skipped.append({"name": name, "reason": reason})
        print(f"without {name}: {reason}", file=sys.stderr)

    def case(self, num_clients: int, turns: dict[str, list[LoadResult]]) -> None:
        """Report all sides at a number of clients; shares are of the first side."""
        speeds = {name: statistics.median(turn.tokens_per_s for turn in found) for name, found in turns.items()}
        for name, found in turns.items():
            row = {
                "clients": num_clients, "side": name, "tokens_per_s": [turn.tokens_per_s for turn in found],
                "share": speeds[name] / next(iter(speeds.values())),
                "quire_ratio": speeds[OURS] / speeds[name] if OURS in speeds else None,
                **{f"{metric}_ms": percentiles(found, metric) for metric in ("ttft", "itl")},
            }  # fmt: skip
            self.rows.append(row)
            self._table.row(name, num_clients, speeds[name], row["share"], row["quire_ratio"],
                            *row["ttft_ms"].values(), *row["itl_ms"].values())  # fmt: skip


def percentiles(turns: Sequence[LoadResult], metric: str) -> dict[str, float]:
    """Of all requests of all turns together."""
    values = [value for turn in turns for value in turn.values_ms(metric)]
    return {f"p{percent}": percentile(values, percent) for percent in PERCENTS}


@contextmanager
def only(side: Side, sides: Sequence[Side]) -> Iterator[Side]:
    """The others are stopped meanwhile: what they do while they wait costs this one nothing."""
    side.resume()
    try:
        yield side
    finally:
        if len(sides) > 1:
            side.pause()


def measure_case(sides: list[Side], num_clients: int, turns: Sequence[list[Body]], report: Report) -> None:
    """Measure all turns with `num_clients` clients. A side that fails is reported and leaves. Mutates: `sides`."""
    found: dict[str, list[LoadResult]] = {side.name: [] for side in sides}
    for turn, bodies in enumerate(turns):
        first = turn % len(sides)
        for side in sides[first:] + sides[:first]:
            try:
                with only(side, sides):
                    found[side.name].append(side.measure(num_clients, bodies))
            except RuntimeError as error:
                report.skip(side.name, str(error))
                sides.remove(side)
                del found[side.name]
    report.case(num_clients, found)


def idle_ms(side: Side, sides: Sequence[Side], bodies: Sequence[Body]) -> float:
    """Time to the first token of one request at a time."""
    with only(side, sides):
        return statistics.median(side.measure(1, [body]).values_ms("ttft")[0] for body in bodies)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start all sides, measure all cases; what goes into the file."""
    report = Report()
    model = arguments.model
    bodies = Bodies(model, arguments.words, arguments.generate, seed=0, temperature=0)
    short = Bodies(model, arguments.words, IDLE_TOKENS, seed=1, temperature=0)
    sides: list[Side] = [Offline(model)]
    first_ten: list[float] = []
    with ExitStack() as stack:
        for name in arguments.sides:
            try:
                if name not in RECIPES:
                    raise Skipped(f"there is no side {name!r}; there are {', '.join(RECIPES)}")
                side = stack.enter_context(running(RECIPES[name](model, arguments.threads, vars(arguments))))
            except (Skipped, RuntimeError) as error:
                report.skip(name, str(error))
                continue
            if side.name == OURS:
                first_ten = [side.measure(1, short.take(1)).values_ms("ttft")[0] for _ in range(10)]
            side.measure(8, short.take(8))
            side.pause()
            sides.append(side)
        for num_clients in map(int, arguments.clients.split(",")):
            requests = max(8, arguments.requests * num_clients)
            measure_case(sides, num_clients, [bodies.take(requests) for _ in range(arguments.turns)], report)
        idle = {side.name: idle_ms(side, sides, short.take(NUM_IDLE)) for side in sides}
        settings = {side.name: dict(side.settings) for side in sides}
    for name, milliseconds in idle.items():
        print(f"time to first token, idle, {name}: {milliseconds:.1f} ms")
    if first_ten:
        print(f"{OURS}, the same right after its start: first {first_ten[0]:.1f} ms, tenth {first_ten[9]:.1f} ms")
    return {
        "schema": "quire.bench.served/1", "version": __version__, "cpu": cpu_name(), "model": model,
        "num_threads": arguments.threads, "words": arguments.words, "generated": arguments.generate,
        "settings": settings, "skipped": report.skipped, "rows": report.rows, "idle_ttft_ms": idle,
        "first_ten_ttft_ms": first_ten,
    }  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shared_options(parser, list(RECIPES), what="served")
    parser.add_argument("--clients", default="1,8,32", help="at once  [%(default)s]")
    parser.add_argument("--turns", type=int, default=3, help="of each side  [%(default)s]")
    parser.add_argument("--requests", type=int, default=3, help="per client and turn, at least 8 in all  [%(default)s]")
    parser.add_argument("--words", type=int, default=100, help="of a prompt  [%(default)s]")
    parser.add_argument("--generate", type=int, default=128, help="tokens per answer  [%(default)s]")
    arguments = finish_arguments(parser, None)
    write_result(run(arguments), arguments)


if __name__ == "__main__":
    main()
