"""Schemathesis: requests made from docs/openapi.json, good and bad, and every answer held to it.

`python -m benchmarks.soak --only B1` makes ten thousand.
"""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.soak.inputs.api import FEW_CASES, OPERATIONS, load, try_operation
from tests.engine.builders import saying
from tests.server.fake_engine import LIMIT_S, MODEL, listening, make_server

pytest.importorskip("schemathesis", reason="schemathesis is not installed")
CASES_PER_ROUTE = 15
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    """Load the API's description, with a server to send its requests to."""
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
    yield load(address[0])
    loop.call_soon_threadsafe(stop.set)
    thread.join(LIMIT_S)


@pytest.mark.parametrize("is_good", [True, False], ids=["good", "bad"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_described(api: Any, method: str, path: str, is_good: bool) -> None:
    count = CASES_PER_ROUTE if method == "post" else FEW_CASES
    found = try_operation(api, method, path, is_good=is_good, count=count, model=MODEL)
    assert not found.breaks
    assert (found.undocumented, found.accepted) == (0, 0)
    assert max(found.statuses, default=0) < 500
    if is_good and method == "post" and path != "/classify":  # the model has no classification head
        # Hypothesis also draws constants of the modules that are loaded, so the share depends on the other tests.
        assert found.statuses[200] > count // 10, found.statuses
