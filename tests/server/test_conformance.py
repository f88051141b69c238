"""Schemathesis: requests made from docs/openapi.json, good and bad, and every answer held to it.

`QUIRE_TEST_CASES=800` tries more than 15 requests per route.
"""

import asyncio
import copy
import json
import os
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

from quire.server.openapi import ENDPOINTS, PATH
from quire.text.tokenizer_parts import FimTokens
from tests.engine.builders import saying
from tests.server.fake_engine import LIMIT_S, MODEL, listening, make_server

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
pytestmark = pytest.mark.slow
DOCUMENT: dict[str, Any] = json.loads((Path(__file__).parents[2] / PATH).read_text())
CHANGING = {"/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""Routes that other cases would feel, or that no invented name and path can please."""
OPERATIONS = [(method, path) for path, operations in DOCUMENT["paths"].items() for method in operations
              if path not in CHANGING]  # fmt: skip
CASES_PER_ROUTE, CASES_WITHOUT_BODY = int(os.environ.get("QUIRE_TEST_CASES", "15")), 5
# There are no keys in this server; and what fits the description may still be too long for the model, or contradict
# itself: that is a 400, which is described.
NOT_CHECKED = ("ignored_auth", "positive_data_acceptance")
REQUIRED = {
    endpoint.path: {name for name, field in endpoint.body.model_fields.items() if field.is_required()}
    for endpoint in ENDPOINTS
    if endpoint.body is not None
}
REQUIRED["/tokenize"] = {"prompt"}  # or messages
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LENGTH_OF = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
"""Field that keeps an answer short if the request does not."""
MAX_LENGTH = 8
NUM_OPTIONAL = 2
"""Optional fields of a good request: hardly any with random values of all would be answered."""


def with_few_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Return the description with as few fields in a body: to draw others and leave them out takes longest of all."""
    document = copy.deepcopy(document)
    for path, required in REQUIRED.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        body = document["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]
        number = min(len(required) + NUM_OPTIONAL, len(body["properties"]))
        body.update(minProperties=number, maxProperties=number)
    return document


@pytest.fixture(scope="module")
def apis() -> Iterator[dict[bool, Any]]:
    """Load the API's description for good and other requests, with a server to send them to."""
    app, _ = make_server(next_token=saying("ok"))
    app.state.quire.engines.front_end.tokenizer.fim = FimTokens(1, 2, 3)  # for /infill
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
    schemas = {
        is_good: schemathesis.openapi.from_dict(with_few_fields(DOCUMENT) if is_good else DOCUMENT)
        for is_good in (True, False)
    }
    for schema in schemas.values():
        schema.config.update(base_url=address[0])
    yield schemas
    loop.call_soon_threadsafe(stop.set)
    thread.join(LIMIT_S)


def plausible(body: dict[str, Any], random: Random, path: str) -> dict[str, Any]:
    """Keep few of the fields, make the answers short, and leave a loaded machine the time for them."""
    required = REQUIRED[path]
    optional = [name for name in body if name not in required]
    kept = {*required, *random.sample(optional, min(len(optional), NUM_OPTIONAL))}
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
    if isinstance(found.get("deadline_s"), int | float):
        found["deadline_s"] = max(found["deadline_s"], LIMIT_S)
    if path in LENGTH_OF and not any(found.get(name) is not None for name in LENGTHS):
        found[LENGTH_OF[path]] = MAX_LENGTH
    return {**found, "model": MODEL} if "model" in found else found


@pytest.mark.parametrize("is_good", [True, False], ids=["good", "bad"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_described(apis: dict[bool, Any], method: str, path: str, is_good: bool) -> None:
    count = CASES_PER_ROUTE if method == "post" else CASES_WITHOUT_BODY
    mode = schemathesis.GenerationMode.POSITIVE if is_good else schemathesis.GenerationMode.NEGATIVE
    every = schemathesis.checks.CHECKS.get_all()
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(apis[is_good][path][method.upper()].as_strategy(generation_mode=mode), st.randoms(use_true_random=False))
    def look(case: Any, random: Random) -> None:
        if is_good and method == "post":
            case.body = plausible(case.body, random, path)
            case.operation = apis[False][path]["POST"]  # whose number of fields is not limited
        response = case.call(timeout=LIMIT_S)
        statuses[response.status_code] += 1
        assert str(response.status_code) in DOCUMENT["paths"][path][method]["responses"]
        assert response.status_code < 500
        assert is_good or response.status_code >= 400
        case.validate_response(response, excluded_checks=[check for check in every if check.__name__ in NOT_CHECKED])

    try:
        look()
    except Unsatisfiable:  # a request without parameters cannot be wrong
        assert not is_good
    if is_good and method == "post" and path != "/classify":  # the model has no classification head
        # Hypothesis also draws constants of the modules that are loaded, so the share depends on the other tests.
        assert statuses[200] > count // 10, statuses
