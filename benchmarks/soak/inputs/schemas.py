"""B5: thousands of JSON Schemas, and hundreds of forms that are meant to hurt: compiled or refused, soon.

The schemas are made here from a seed, in the shapes and with the mistakes of those that people publish; no public
collection is read. There are as many as in the collection that others quote, 11,306.
What is generated is held to its schema by the jsonschema package, which knows nothing of grammars; it is one of the
tests' packages. Next to read: `schema_maker.py`, `hostile_forms.py`.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.soak.inputs.hostile_forms import ALL
from benchmarks.soak.inputs.plain_http import Answer, Client, connected, share
from benchmarks.soak.inputs.processes import MIB, growth_of
from benchmarks.soak.inputs.schema_maker import make_schema
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server

LIMIT_S = 2.0
SLACK_S = 1.0
"""For the matcher, the first token, and a new process for grammars where one was ended."""
MAX_GROWTH_MIB = 256
NUM_LONG_PROMPTS = 16
LONG_PROMPT_LEN = 500
ORACLE_EVERY = 3
NUM_TOKENS = 150
TURNS = 10
"""A busy machine may refuse a grammar for now, with 429."""


@dataclass
class Outcome:
    """What came of all forms."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    worst_s: float = 0.0
    worst: str = ""
    num_complete: int = 0
    num_invalid: int = 0

    def note(self, name: str, answer: Answer) -> None:
        """One answer."""
        self.statuses[answer.status] += 1
        if answer.took_s > self.worst_s:
            self.worst_s, self.worst = answer.took_s, name
        # 413: it does not even fit into a body.
        if answer.status not in (200, 400, 413):
            self.wrong.append(f"{name}: {answer.status} {answer.error.get('message', '')[:80]}")


async def schemas(server: Server, *, count: int = 11_306, seed: int = 0) -> Row:
    """B5."""
    choices = random.Random(seed)
    made = [make_schema(choices) for _ in range(count)]
    generated, hostile, timed = Outcome(), Outcome(), Outcome()

    async def compile_one(client: Client, item: tuple[int, dict[str, Any]]) -> None:
        number, schema = item
        form = {"json": schema}
        if number % ORACLE_EVERY:
            return timed.note(f"schema {number}", await _ask(client, form, 1))
        answer = await _ask(client, form, NUM_TOKENS)
        generated.note(f"schema {number}", answer)
        if answer.status == 200:
            _judge(generated, number, schema, answer.json["choices"][0])

    computed_s = 0.0
    num_touched = await _touch_blocks(server)
    with growth_of(server) as growth:
        await share(server.url, enumerate(made), compile_one, num_clients=4)
        async with connected(server.url) as client:
            for name, form in ALL.items():
                before_s = _computed_s(server)
                hostile.note(name, await _ask(client, form, 1))
                computed_s = max(computed_s, _computed_s(server) - before_s)
            after = await _ask(client, {"regex": "ab+"}, 8)
    row = Row("B5", f"{count} schemas made from a seed, {len(ALL)} hostile forms")
    for name, outcome in (("generated", timed), ("generated, with an answer", generated), ("hostile", hostile)):
        row.note(name, " ".join(f"{status}:{number}" for status, number in sorted(outcome.statuses.items())))
        row.check("others than 200 and 400", "; ".join([str(len(outcome.wrong)), *outcome.wrong[:3]]),
                  passes=not outcome.wrong)  # fmt: skip
        if outcome is not generated:
            row.note(f"worst s by the clock ({outcome.worst})", outcome.worst_s)
    limit_s = LIMIT_S + SLACK_S
    row.check(f"worst s of processor time, hostile (≤ {limit_s:g})", computed_s, passes=computed_s <= limit_s)
    row.check("complete answers", generated.num_complete, passes=generated.num_complete > 0)
    row.check("of these against their schema", generated.num_invalid, passes=not generated.num_invalid)
    row.check(f"peak RSS +MiB (≤ {MAX_GROWTH_MIB})", growth.mib, passes=growth.mib <= MAX_GROWTH_MIB)
    row.check("long prompts before, for the KV blocks", num_touched, passes=num_touched == NUM_LONG_PROMPTS)
    row.note("MiB of the processes that compile first", growth.new_bytes / MIB)
    row.check("a good form afterwards", after.status, passes=after.status == 200)
    return row


async def _touch_blocks(server: Server) -> int:
    """Write each KV block once: its memory is no grammar's. Returns: how many prompts were answered."""
    statuses: list[int] = []

    async def fill(client: Client, first_id: int) -> None:
        prompt = [first_id] + [5] * (LONG_PROMPT_LEN - 1)
        answer = await client.ask("POST", "/v1/completions", {"model": "soak", "prompt": prompt, "max_tokens": 4})
        statuses.append(answer.status)

    await share(server.url, range(100, 100 + NUM_LONG_PROMPTS), fill, num_clients=8)
    return statuses.count(200)


def _computed_s(server: Server) -> float:
    """Processor time of server, engine and their processes for grammars: what was ended is not in it."""
    found = 0.0
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


async def _ask(client: Client, form: dict[str, Any], max_tokens: int) -> Answer:
    body = {
        "model": "soak", "prompt": "An example:\n", "max_tokens": max_tokens, "temperature": 1, "seed": 1,
        "structured_outputs": form,
    }  # fmt: skip
    for _ in range(TURNS):
        answer = await client.ask("POST", "/v1/completions", body)
        if answer.status != 429:
            break
        await asyncio.sleep(0.5)
    return answer


def _judge(outcome: Outcome, number: int, schema: dict[str, Any], choice: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator

    if choice["finish_reason"] != "stop":
        return
    outcome.num_complete += 1
    try:
        is_valid = Draft202012Validator(schema).is_valid(json.loads(choice["text"]))
    except Exception as error:  # no JSON; or the oracle cannot read the schema, which the server then should not have
        is_valid = False
        outcome.wrong.append(f"schema {number}: {type(error).__name__}")
    if not is_valid:
        outcome.num_invalid += 1
        outcome.wrong.append(f"schema {number} {json.dumps(schema)[:200]}: {choice['text'][:100]}")
