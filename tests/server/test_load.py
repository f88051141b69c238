"""Short loads on a real server with a tiny model, without assertions on times.

`python -m benchmarks.soak` has the long ones and their limits in time.
"""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak.client import Manners, ask, chat_body
from benchmarks.soak.loads import HELLO, gathered, pool_pressure
from benchmarks.soak.server import Server, serving
from tests.cli.tiny_directory import make_tiny_directory

SEATS, QUEUE = 4, 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    limits = ("--max-num-seqs", str(SEATS), "--max-queued-requests", str(QUEUE))
    with serving(str(model), *limits, environment={"QUIRE_FAULTS": "slow-step:ms=5"}) as running:
        yield running


def test_disconnects_of_all_clients_free_everything(server: Server) -> None:
    async def storm() -> None:
        await ask(server.url, HELLO)
        num_files = server.num_files()
        # Fewer than there is room for: the place of the first may be given back a moment after its answer.
        bodies = [chat_body(f"Story {index}", 1900, stream=index % 2 == 0) for index in range(QUEUE)]
        seen = await asyncio.gather(*(ask(server.url, body, Manners(hang_up_after_s=0.5)) for body in bodies))
        assert [(item.status, item.error) for item in seen if not item.hung_up] == []
        assert await server.seconds_until_idle() < math.inf
        assert (await ask(server.url, HELLO)).is_good
        assert (await server.metrics()).value("quire_requests_total", finish_reason="abort") > 0
        assert server.num_files() <= num_files + 2

    asyncio.run(storm())


def test_requests_beyond_the_queue_get_429_with_retry_after(server: Server) -> None:
    seen = asyncio.run(gathered(server, 2 * (SEATS + QUEUE), 10))
    refused = [item for item in seen if item.status == 429]
    assert {item.status for item in seen} == {200, 429}
    assert all(item.is_good and item.num_tokens == 10 for item in seen if item.status == 200)
    assert all(item.retry_after_s is not None and item.retry_after_s >= 1 for item in refused)
    assert asyncio.run(ask(server.url, HELLO)).is_good


def test_full_kv_cache_changes_no_text(model: Path) -> None:
    row = asyncio.run(pool_pressure(str(model), count=24, max_tokens=60, num_blocks=40))
    assert row.passes, row.cells()
    assert {name: value for name, value, _ in row.checks}["preemptions"] > 0
