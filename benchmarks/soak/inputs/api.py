"""B1: requests made from docs/openapi.json by schemathesis, good and bad, and every answer held to it.

Shared by the table and the tests of the server. Schemathesis is one of the tests' packages. Next to read: `table.py`.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.soak.row import Row
from benchmarks.soak.server import Server
from quire.server.openapi import ENDPOINTS, PATH

DOCUMENT: dict[str, Any] = json.loads((Path(__file__).parents[3] / PATH).read_text())
CHANGING = {"/sleep", "/wake_up"}
"""Routes that other cases would feel."""
OPERATIONS = [(method, path) for path, operations in DOCUMENT["paths"].items() for method in operations
              if path not in CHANGING]  # fmt: skip
NUM_POSTS = sum(method == "post" for method, _ in OPERATIONS)
FEW_CASES = 5
"""Of a route that takes no body."""
# There are no keys in this server; and what fits the description may still be too long for the model, or contradict
# itself: that is a 400, which is described.
NOT_CHECKED = ("ignored_auth", "positive_data_acceptance")
REQUIRED = {
    endpoint.path: {name for name, field_ in endpoint.body.model_fields.items() if field_.is_required()}
    for endpoint in ENDPOINTS
    if endpoint.body is not None
}
REQUIRED["/tokenize"] = {"prompt"}  # or messages
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LENGTH_OF = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
"""Field that keeps an answer short if the request does not."""
MAX_LENGTH = 8
TIMEOUT_S = 120.0


@dataclass
class Found:
    """Results of the cases of a route. `breaks`: contradictions to the description, with their cases."""

    statuses: Counter[int] = field(default_factory=Counter)
    breaks: list[str] = field(default_factory=list)
    undocumented: int = 0
    accepted: int = 0
    """Bad requests that were not answered with 4xx."""

    @property
    def num_cases(self) -> int:
        """Number of cases."""
        return self.statuses.total()


def load(url: str) -> Any:
    """The description, as schemathesis reads it, with a server to send its requests to."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.config.update(base_url=url)
    return schema


def try_operation(api: Any, method: str, path: str, *, is_good: bool, count: int, model: str) -> Found:
    """Send up to `count` requests that the description allows, or that it forbids."""
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Unsatisfiable

    mode = schemathesis.GenerationMode.POSITIVE if is_good else schemathesis.GenerationMode.NEGATIVE
    operation = api[path][method.upper()]
    documented = DOCUMENT["paths"][path][method]["responses"]
    every = schemathesis.checks.CHECKS.get_all()
    excluded = [check for check in every if check.__name__ in NOT_CHECKED]
    found = Found()

    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(operation.as_strategy(generation_mode=mode), st.randoms(use_true_random=False))
    def look(case: Any, random: Random) -> None:
        if is_good and method == "post":
            case.body = plausible(case.body, random, REQUIRED[path], model)
            if path in LENGTH_OF and not any(case.body.get(name) is not None for name in LENGTHS):
                case.body[LENGTH_OF[path]] = MAX_LENGTH
        response = case.call(timeout=TIMEOUT_S)
        found.statuses[response.status_code] += 1
        found.undocumented += str(response.status_code) not in documented
        found.accepted += not is_good and not 400 <= response.status_code < 500
        # Schemathesis holds each event to the schema, which in OpenAPI 3.1 is that of the whole text. Tests of the
        # routes hold events to the types of OpenAI's client.
        is_stream = "text/event-stream" in str(response.headers.get("content-type"))
        unfit = [check for check in every if is_stream and check.__name__ == "response_schema_conformance"]
        try:
            case.validate_response(response, excluded_checks=[*excluded, *unfit])
        except (Exception, BaseExceptionGroup) as error:  # schemathesis raises groups of its own failures
            found.breaks.append(f"{method} {path}: {error}")

    try:
        look()
    except Unsatisfiable:
        if is_good:
            raise
        # A request without parameters cannot be wrong.
    return found


def plausible(body: dict[str, Any], random: Random, required: set[str], model: str) -> dict[str, Any]:
    """With all of its fields at random values, hardly any request would be answered: keep a few of them, and make the
    answers short."""
    optional = [name for name in body if name not in required]
    kept = {*required, *random.sample(optional, min(len(optional), 2))}
    found = {name: value for name, value in body.items() if name in kept}
    if "tokens" in found:
        found["tokens"] = [int(token_id) % 260 for token_id in found["tokens"]]
    if "prompt" in required:
        found["prompt"] = found.get("prompt") or "hi"
        found.pop("messages", None)
    for message in found.get("messages") or []:
        message["content"] = message.get("content") or "hi"
    for name in LENGTHS:
        if isinstance(found.get(name), int | float) and found[name] > MAX_LENGTH:
            found[name] = MAX_LENGTH
    if "model" in found:
        found["model"] = model
    return found


def runs(count: int) -> Iterator[tuple[str, str, bool, int]]:
    """Method, path, whether the requests are good, and how many of `count` there are."""
    for method, path in OPERATIONS:
        for is_good in (True, False):
            yield method, path, is_good, -(-count // (2 * NUM_POSTS)) if method == "post" else FEW_CASES


async def conformance(server: Server, *, count: int = 10_000) -> Row:
    """B1."""
    api = load(server.url)
    statuses: Counter[int] = Counter()
    breaks: list[str] = []
    num_undocumented = num_accepted = num_bad = 0
    for method, path, is_good, number in runs(count):
        found = await asyncio.to_thread(
            try_operation, api, method, path, is_good=is_good, count=number, model="soak"
        )  # fmt: skip
        statuses += found.statuses
        breaks += found.breaks
        num_undocumented += found.undocumented
        num_accepted += found.accepted
        num_bad += 0 if is_good else found.num_cases
    row = Row("B1", f"{statuses.total()} requests made from docs/openapi.json, {num_bad} of them bad")
    row.note("statuses", " ".join(f"{status}:{number}" for status, number in sorted(statuses.items())))
    num_errors = sum(number for status, number in statuses.items() if status >= 500)
    row.check("5xx", num_errors, passes=not num_errors)
    row.check("undocumented statuses", num_undocumented, passes=not num_undocumented)
    row.check("bad ones not answered with 4xx", num_accepted, passes=not num_accepted)
    first = f": {' '.join(breaks[0].split())[:300]}" if breaks else ""
    row.check("other breaks of the description", f"{len(breaks)}{first}", passes=not breaks)
    row.check("cases", statuses.total(), passes=statuses.total() >= count)
    return row
