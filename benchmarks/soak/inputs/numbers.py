"""B6: every numeric field of every route at its limits and beyond, with the exact answer to each value.

The limits stand here a second time, as docs/api.md and OpenAI's reference have them, and are not read from the server.
Next to read: `processes.py`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

from benchmarks.soak.inputs.processes import share
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server

INT = 2**31 - 1
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, DETOKENIZE = "/v1/embeddings", "/detokenize"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "soak", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    TEXT: {"model": "soak", "prompt": "hi", "max_tokens": 1},
    RESPONSES: {"model": "soak", "input": "hi", "max_output_tokens": 1},
    EMBEDDINGS: {"model": "soak", "input": "hi"},
    DETOKENIZE: {"model": "soak"},
}
NAN, INFINITE = "NaN", "Infinity"
"""Written bare into the body: neither is JSON."""
OTHER_TYPES: tuple[Any, ...] = ("1", True, None, [], {})


@dataclass(frozen=True)
class Number:
    """A field and what it takes. `above`: the least value itself is not taken. `refused`: values within the limits that
    cannot be served, such as more tokens than the context has. `other`: other fields that it needs."""

    name: str
    least: float
    most: float
    is_integer: bool = True
    above: bool = False
    takes_null: bool = True
    refused: frozenset[float] = frozenset()
    other: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    """`param` of the error; None: the name."""

    def values(self) -> list[Any]:
        """Limits, their neighbours, and what is no number of JSON."""
        step = 1 if self.is_integer else 0.5
        numbers = [self.least - step, self.least, self.most, self.most + step, 0, -1, 2**31, 2**63, 1.5]
        found = [int(value) if self.is_integer and value != 1.5 else value for value in numbers]
        return [*dict.fromkeys(found), NAN, INFINITE, *OTHER_TYPES]

    def takes(self, value: Any) -> bool:
        """Return True if the answer must be 200."""
        if value is None:
            return self.takes_null
        if isinstance(value, bool) or not isinstance(value, int | float) or value in self.refused:
            return False
        if self.is_integer and not isinstance(value, int):
            return False
        return (self.least < value if self.above else self.least <= value) and value <= self.most


SAMPLING = (
    Number("temperature", 0, 2, is_integer=False),
    Number("top_p", 0, 1, is_integer=False),
    Number("top_k", -1, INT),
    Number("min_p", 0, 1, is_integer=False),
    Number("seed", -(2**63), 2**63 - 1),
    Number("presence_penalty", -2, 2, is_integer=False),
    Number("frequency_penalty", -2, 2, is_integer=False),
    Number("repetition_penalty", 0, 1000, is_integer=False, above=True),
    # More than max_tokens can never be written.
    Number("min_tokens", 0, INT, refused=frozenset({INT})),
    # 0 keeps nothing.
    Number("truncate_prompt_tokens", -1, INT, refused=frozenset({0})),
    Number("priority", -INT, INT),
    Number("stream_interval", 1, INT),
)
COMPLETIONS = (
    *SAMPLING,
    Number("n", 1, 128),
    Number("prompt_logprobs", 0, 20),
)
FIELDS: dict[str, tuple[Number, ...]] = {
    CHAT: (
        *COMPLETIONS,
        Number("max_tokens", 1, INT),
        Number("max_completion_tokens", 1, INT),
        Number("top_logprobs", 0, 20, other={"logprobs": True}),
    ),
    TEXT: (
        *COMPLETIONS,
        Number("max_tokens", 0, INT, refused=frozenset({0})),
        Number("best_of", 1, INT, refused=frozenset({INT})),
        Number("logprobs", 0, 20),
    ),
    RESPONSES: (
        *SAMPLING,
        Number("max_output_tokens", 1, INT),
        Number("top_logprobs", 0, 20),
        Number("max_tool_calls", 1, INT),
    ),
    EMBEDDINGS: (
        Number("dimensions", 1, 576),
        Number("truncate_prompt_tokens", -1, INT, refused=frozenset({0})),
        Number("priority", -INT, INT),
    ),
    DETOKENIZE: (Number("tokens", 0, 49151, takes_null=False, path="tokens.0"),),
}


@dataclass(frozen=True)
class Cell:
    """A field with a value."""

    route: str
    number: Number
    value: Any

    def body(self) -> bytes:
        """The request."""
        value = [self.value] if self.route == DETOKENIZE else self.value
        text = json.dumps({**BASES[self.route], **self.number.other, self.number.name: value})
        for bare in (NAN, INFINITE):
            if self.value == bare:
                text = text.replace(f'"{bare}"', bare)
        return text.encode()

    def expected(self) -> tuple[int, str | None]:
        """Status and `param`. What is no JSON has no field yet."""
        if self.value in (NAN, INFINITE):
            return 400, None
        return (200, None) if self.number.takes(self.value) else (400, self.number.path or self.number.name)

    def __str__(self) -> str:
        return f"{self.route} {self.number.name}={self.value!r}"


def cells() -> Iterator[Cell]:
    """All of them."""
    for route, numbers in FIELDS.items():
        for number in numbers:
            for value in number.values():
                yield Cell(route, number, value)


async def numeric_fields(server: Server) -> Row:
    """B6 on a running server of SmolLM2: its width and vocabulary are limits too."""
    wrong: list[str] = []
    items = list(cells())

    async def ask(client: httpx2.AsyncClient, cell: Cell) -> None:
        answer = await client.post(cell.route, content=cell.body(), headers={"Content-Type": "application/json"})
        found = answer.status_code, (answer.json().get("error") or {}).get("param")
        if found != cell.expected():
            wrong.append(f"{cell}: {found}, not {cell.expected()}")

    await share(server.url, items, ask)
    row = Row("B6", f"{len(items)} cells of numeric fields at and beyond their limits")
    row.check("wrong status or param", "; ".join([str(len(wrong)), *sorted(wrong)[:5]]), passes=not wrong)
    return row
