"""Schemathesis: hundreds of requests made from docs/openapi.json, good and bad, and every answer held to it."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from quire.server.openapi import ENDPOINTS
from tests.engine.builders import saying
from tests.server.fake_engine import LIMIT_S, MODEL, listening, make_server

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
DOCUMENT = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text())
CASES_PER_ROUTE = 60
FEW_CASES = 5
pytestmark = pytest.mark.slow
# There are no keys in this server; and what fits the description may still be too long for the model, or contradict
# itself: that is a 400, which is described.
NOT_CHECKED = ("ignored_auth", "positive_data_acceptance")


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    """The description, with a server to send its requests to."""
    app, _ = make_server(next_token=saying("ok"))
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    address: list[str] = []
    ready = threading.Event()

    async def serve() -> None:
        async with listening(app) as url:
            address.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(LIMIT_S)
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.config.update(base_url=address[0])
    yield schema
    loop.call_soon_threadsafe(stop.set)
    thread.join(LIMIT_S)


REQUIRED = {
    endpoint.path: {name for name, field in endpoint.body.model_fields.items() if field.is_required()}
    for endpoint in ENDPOINTS
    if endpoint.body is not None
}
REQUIRED["/tokenize"] = {"prompt"}  # or messages
OPERATIONS = [(method, path) for path, operations in DOCUMENT["paths"].items() for method in operations]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_described(api: Any, method: str, path: str, mode: Any) -> None:
    operation = api[path][method.upper()]
    is_good = mode is schemathesis.GenerationMode.POSITIVE
    excluded = [check for check in schemathesis.checks.CHECKS.get_all() if check.__name__ in NOT_CHECKED]
    num_examples = CASES_PER_ROUTE if method == "post" else FEW_CASES
    statuses: Counter[int] = Counter()

    @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(operation.as_strategy(generation_mode=mode), st.randoms(use_true_random=False))
    def holds(case: Any, random: Random) -> None:
        if is_good and method == "post":
            case.body = plausible(case.body, random, REQUIRED[path])
        response = case.call_and_validate(excluded_checks=excluded)
        statuses[response.status_code] += 1
        assert response.status_code < 500

    try:
        holds()
    except Unsatisfiable:
        assert not is_good, "a request without parameters cannot be wrong"
    if is_good and method == "post":
        assert statuses[200] > num_examples // 5, statuses


def plausible(body: dict[str, Any], random: Random, required: set[str]) -> dict[str, Any]:
    """With all of its fields at random values, hardly any request would be answered: keep a few of them."""
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
    if "model" in found:
        found["model"] = MODEL
    return found


def test_these_are_hundreds_of_cases() -> None:
    assert 2 * CASES_PER_ROUTE * sum(method == "post" for method, _ in OPERATIONS) >= 500
