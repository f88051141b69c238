"""The table of bad inputs: its rows by id, and their numbers of cases.

Damaged files, templates, schemas, keys and log injection are tests: tests/weights, text, grammar, server.
"""

from collections.abc import Awaitable, Callable

from benchmarks.soak.inputs import api, numbers, unique, wire
from benchmarks.soak.inputs.wire_cases import MODEL
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, serving

SMALL = ("--max-num-seqs", "8", "--max-model-len", "512", "--num-blocks-override", "256")
"""Few KV blocks: each is touched for the first time by some request, and would count as growth."""
COUNTS = {"B1": 10_000, "B2": 100_000, "B9": 1_000_000}


def checks(model: str, repeat: int | None) -> dict[str, Callable[[], Awaitable[Row]]]:
    """Return all rows by id. `repeat`: cases of each instead of `COUNTS`."""

    def count(row: str) -> int:
        return repeat or COUNTS[row]

    async def on_server(row: Callable[[Server], Awaitable[Row]], *options: str) -> Row:
        with serving(model, *SMALL, *options) as server:
            return await row(server)

    named = ("--served-model-name", MODEL)
    many = ("--max-num-seqs", "128", "--num-blocks-override", "1024", "--scheduling-policy", "priority")
    return {
        "B1": lambda: on_server(lambda server: api.conformance(server, count=count("B1"))),
        "B2": lambda: on_server(lambda server: wire.wire_fuzz(server, count=count("B2")), *named),
        "B6": lambda: on_server(numbers.numeric_fields, *many),
        "B9": lambda: on_server(lambda server: unique.unique_values(server, num_ids=count("B9"))),
    }
