"""Tables of a server under loads (L), attacks (A), faults (F) and bad inputs (B), on a real `quire serve`.

    python -m benchmarks.soak [--only L1,F2] [--model smollm2] [--duration-s 600] [--repeat 8] [--json]
        [--server-options "--max-num-batched-tokens 256"]
    make soak, make faults, make inputs

One row per test: id, what, what was measured with its limit, whether all limits hold; the exit code is 6 if one does
not. Drains, faulty requests, storms of disconnects, preemption and failed starts have tests instead. Timings want a
machine that does nothing else. Next to read: `loads.py`, `faults.py`, `wire.py`.
"""

import argparse
import asyncio
import json
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

import httpx2

from benchmarks.soak import (
    attacks,
    faults,
    files,
    hogs,
    kernels,
    loads,
    long,
    looks,
    memory,
    model_files,
    model_fuzz,
    overload,
    readers,
    sockets,
    wire,
    work,
)
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, serving

HEADER = ("id", "what", "measured", "pass?")
TABLES = ("L", "A", "F", "B")
SLOTS, QUEUE = 8, 32
SHORT = ("--max-num-seqs", str(SLOTS), "--max-model-len", "2048")
REPEATS = {"F2": 8, "F5": 200, "F8": 30, "B2": 100_000, "A9": 8000}


def checks(arguments: argparse.Namespace) -> dict[str, Callable[[], Awaitable[Row]]]:
    """All rows by id."""
    model, duration_s = arguments.model, arguments.duration_s

    def repeat(row: str) -> int:
        return arguments.repeat or REPEATS[row]

    async def on_server(row: Callable[[Server], Awaitable[Row]], *options: str) -> Row:
        with serving(model, *SHORT, *options, *shlex.split(arguments.server_options)) as server:
            return await row(server)

    queue = ("--max-queued-requests", str(QUEUE))
    return {
        "L1": lambda: on_server(lambda server: long.soak(server, duration_s=duration_s, seed=arguments.seed)),
        "L2": lambda: on_server(
            lambda server: overload.overload(
                server, num_slots=SLOTS, num_places=SLOTS + QUEUE, duration_s=min(duration_s, 300)
            ),
            *queue,
        ),
        "L4": lambda: on_server(loads.fairness),
        "L5": lambda: on_server(readers.slow_readers, "--max-num-seqs", "24"),
        "L6": lambda: on_server(loads.connections),
        "L7": lambda: on_server(lambda server: attacks.slow_attacks(server.url, duration_s=min(duration_s, 240))),
        "A4": lambda: model_files.hostile_template(model),
        "A5a": lambda: sockets.half_requests(model, duration_s=min(duration_s, 20)),
        "A5b": lambda: sockets.large_bodies(model, duration_s=min(duration_s, 20)),
        "A5c": lambda: sockets.keyless_bodies(model, duration_s=min(duration_s, 20)),
        "A8": lambda: looks.looks(model, duration_s=min(duration_s, 30)),
        "A9": lambda: model_fuzz.model_fuzz(count=repeat("A9"), seed=arguments.seed),
        "A10": kernels.kernels,
        "F2": lambda: faults.kill_engine(model, repeat=repeat("F2")),
        "F4": lambda: faults.stopped_engine(model),
        "F5": lambda: faults.cut_links(model, count=repeat("F5")),
        "F6": lambda: files.lost_files(model),
        "F7": lambda: memory.limited_memory(model),
        "F8": lambda: faults.suspended(model, suspend_s=repeat("F8")),
        "F9": lambda: hogs.beside_hogs(model),
        "A2a": lambda: work.grammars(model),
        "A2b": lambda: work.left_grammars(model),
        "A2c": lambda: work.long_texts(model),
        "A2d": lambda: work.refusals(model),
        "A2e": lambda: work.counted(model),
        "A2f": lambda: work.schemas(model),
        "B2": lambda: on_server(lambda server: wire.wire_fuzz(server, count=repeat("B2")), *wire.SMALL),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure the rows that were asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ids, or L, A, F or B for all of a table  [all]")
    parser.add_argument("--model", default="smollm2", help="[%(default)s]")
    parser.add_argument("--duration-s", type=float, default=600.0, help="of L1, and at most of L2  [%(default)s]")
    parser.add_argument("--repeat", type=int, help=f"times, seconds of F8, or cases of B2 and A9  [{REPEATS}]")
    parser.add_argument("--server-options", default="", help="more options of quire serve, for the rows L1 to L6")
    parser.add_argument("--seed", type=int, default=0, help="of L1's requests and A9's files  [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(words)
    # As an exception, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    known = checks(arguments)
    wanted = [name.strip() for name in arguments.only.split(",") if name.strip()] or list(TABLES)
    ids = [row for row in known if row in wanted or row[0] in wanted]
    unknown = [name for name in wanted if name not in known and name not in TABLES]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(known)}")
    rows = []
    if not arguments.json:
        print("| " + " | ".join(HEADER) + " |\n" + "|" + " --- |" * len(HEADER), flush=True)
    for row_id in ids:
        rows.append(_measured(row_id, known[row_id]))
        if not arguments.json:
            print("| " + " | ".join(rows[-1].cells()) + " |", flush=True)
    if arguments.json:
        print(json.dumps([asdict(row) | {"passes": row.passes} for row in rows]))
    return 0 if all(row.passes for row in rows) else 6


def _measured(row_id: str, check: Callable[[], Awaitable[Row]]) -> Row:
    async def run() -> Row:
        return await check()

    start_s = time.monotonic()
    try:
        row = asyncio.run(run())
    except (RuntimeError, OSError, TimeoutError, httpx2.HTTPError) as error:
        row = Row(row_id, "could not be measured")
        row.check(f"{type(error).__name__}:", str(error)[:300].replace("\n", " "), passes=False)
    print(f"{row_id}: {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
