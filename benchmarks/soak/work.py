"""Work before admission (A2): requests of one client whose preparation is expensive, beside another client.

Grammars that take their deadline, the same from a client that hangs up, texts of 1 MiB that are truncated, large bodies
that are refused, schemas that take the engine long. Next to read: `beside.py`, `src/quire/server/work.py`.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.soak.beside import ATTACKER, NORMAL, beside, serving_two
from benchmarks.soak.client import CHAT, POLITE, Manners, chat_body, exchange
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server

NUM_GRAMMARS, NUM_TEXTS, NUM_SCHEMAS, NUM_REFUSED = 40, 20, 20, 60
HANG_UP_S = 0.3
PER_MINUTE = 5
TEXT_BYTES, BODY_BYTES = 1 << 20, 4 << 20
_numbers = itertools.count()


def costly_grammar() -> bytes:
    """Return a body of 400 bytes whose grammar, new each time, takes a second or the checker's deadline."""
    name = f"A{next(_numbers)}"
    terms = " & ".join(f"/.*a.{{{term}}}/" for term in range(19))
    form = {"grammar": f"start: {name}\n{name}: {terms}"}
    return json.dumps(chat_body("x", 1, stream=False, structured_outputs=form)).encode()


def large_schema() -> bytes:
    """Return a body of 40 KiB whose schema is in order, and takes a tenth of a second in the engine."""
    names = [f"p{number}" for number in range(2200)]
    schema = {"type": "object", "properties": {name: {} for name in names}, "required": names,
              "additionalProperties": False}  # fmt: skip
    return json.dumps(chat_body("x", 4, stream=False, structured_outputs={"json": schema})).encode()


def long_text() -> bytes:
    """Return a completion of a text of 1 MiB, of which one token is kept."""
    text = "The quick brown fox jumps over the lazy dog. " * (TEXT_BYTES // 45)
    return json.dumps({"model": "soak", "prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 1}).encode()


def refused_bodies() -> list[bytes]:
    """Return bodies of 4 MiB that are wrong: lists, objects, unknown fields, messages, numbers."""
    lists = b"[" + b"[1]," * (BODY_BYTES // 4 - 20) + b"1]"
    objects = b"[" + b"{}," * (BODY_BYTES // 3 - 20) + b"1]"
    fields = {f"f{number}": 1 for number in range(BODY_BYTES // 15)}
    messages = [{"role": "user", "content": 1}] * (BODY_BYTES // 34)
    return [
        b'{"messages":' + lists + b"}",
        b'{"messages":' + objects + b"}",
        json.dumps(fields).encode(),
        json.dumps({"messages": messages}).encode(),
        json.dumps({"messages": [1.5] * (BODY_BYTES // 5 - 10)}).encode(),
    ]


async def grammars(model: str) -> Row:
    """Measure a client beside 40 costly grammars at a time."""
    return await _beside(
        model, "A2a", "40 costly grammars at a time", lambda: [costly_grammar() for _ in range(NUM_GRAMMARS)]
    )


async def left_grammars(model: str) -> Row:
    """Measure a client beside the same, from a sender that hangs up."""
    bodies, manners = lambda: [costly_grammar() for _ in range(NUM_GRAMMARS)], Manners(hang_up_after_s=HANG_UP_S)
    return await _beside(model, "A2b", "the same, given up after 0.3 s", bodies, manners=manners)


async def long_texts(model: str) -> Row:
    """Measure a client beside 20 texts of 1 MiB at a time."""
    bodies = [long_text()] * NUM_TEXTS
    return await _beside(model, "A2c", "20 texts of 1 MiB at a time", lambda: bodies, path="/v1/completions")


async def refusals(model: str) -> Row:
    """Measure a client beside large bodies that are refused."""
    bodies = refused_bodies() * 2
    return await _beside(model, "A2d", f"{len(bodies)} wrong bodies of 4 MiB at a time", lambda: bodies)


async def schemas(model: str) -> Row:
    """Measure a client beside 20 large schemas at a time."""
    bodies = [large_schema()] * NUM_SCHEMAS
    return await _beside(model, "A2f", "20 schemas of 2,200 properties at a time", lambda: bodies)


async def counted(model: str) -> Row:
    """Count the refused bodies that a limit of requests per minute lets through."""
    row = Row("A2e", f"{NUM_REFUSED} wrong bodies, {PER_MINUTE} requests per minute")
    with serving_two(model, "--requests-per-minute", str(PER_MINUTE)) as server:
        statuses = Counter([status for path in (CHAT, "/tokenize")
                            for status in await _send(server, [b"{}"] * (NUM_REFUSED // 2), path=path)])  # fmt: skip
        row.check(f"answered 400 (≤ {PER_MINUTE + 1})", statuses[400], passes=0 < statuses[400] <= PER_MINUTE + 1)
        row.check("answered 429", statuses[429], passes=statuses[429] == NUM_REFUSED - statuses[400])
        other = await _send(server, [b"{}"], key=NORMAL)
        row.check("the other key's first", other[0], passes=other == [400])
    return row


async def _beside(
    model: str,
    row_id: str,
    what: str,
    make_bodies: Callable[[], Sequence[bytes]],
    *,
    path: str = CHAT,
    manners: Manners = POLITE,
) -> Row:
    row, statuses = Row(row_id, what), Counter[int]()

    async def attack(server: Server) -> None:
        statuses.update(await _send(server, make_bodies(), path=path, manners=manners))

    with serving_two(model) as server:
        await beside(row, server, attack, name="beside it")
    row.note("attacker's answers", dict(sorted(statuses.items())))
    return row


async def _send(
    server: Server, bodies: Sequence[bytes], *, path: str = CHAT, manners: Manners = POLITE, key: str = ATTACKER
) -> list[int]:
    """Send bodies at once. Returns: the status of each answer, 0 without one."""
    sent = await asyncio.gather(*(exchange(server.url, "POST", path, body, manners, key=key) for body in bodies))
    return [seen.status for seen in sent]
