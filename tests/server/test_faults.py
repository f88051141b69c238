"""Faults of the engine and of connections, on a real server with a tiny model.

`python -m benchmarks.soak` has the long ones and their limits in time.
"""

import asyncio
import math
from collections.abc import Iterator

import pytest

from benchmarks.soak.client import Seen, ask, chat_body
from benchmarks.soak.faults import cut_links
from benchmarks.soak.server import Server, serving
from tests.cli.tiny_directory import make_tiny_directory

WORDS = ("one", "two", "three", "four")
BAD_TOKENS = {"raise-in-step": ("Z", 57), "nan-logits": ("[", 58), "raise-in-output": ("\\", 59)}
"""By fault: a text, and its token."""
NEVER_DRAWN = {str(token): -100 for _, token in BAD_TOKENS.values()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    faults = [f"{name}:token={token}" for name, (_, token) in BAD_TOKENS.items()]
    with serving(str(model), environment={"QUIRE_FAULTS": ";".join([*faults, "slow-step:ms=3"])}) as running:
        yield running


async def texts_of_others(server: Server) -> list[str]:
    """Texts of requests without the bad tokens."""
    bodies = [
        chat_body(word, 40, temperature=1, seed=index, logit_bias=NEVER_DRAWN) for index, word in enumerate(WORDS)
    ]
    seen = await asyncio.gather(*(ask(server.url, body) for body in bodies))
    assert all(item.is_good and item.num_tokens == 40 for item in seen)
    return [item.text for item in seen]


@pytest.mark.parametrize("fault", BAD_TOKENS)
def test_faulty_request_fails_alone(server: Server, fault: str) -> None:
    async def disturbed(stream: bool) -> tuple[Seen, list[str]]:
        beside = asyncio.create_task(texts_of_others(server))
        await asyncio.sleep(0.05)
        text, token = BAD_TOKENS[fault]
        # Only what is generated is shown.
        fields = {"logit_bias": {str(token): 100}} if fault == "raise-in-output" else {}
        failed = await ask(server.url, chat_body(text, 20, stream=stream, **fields))
        return failed, await beside

    wanted = asyncio.run(texts_of_others(server))
    assert len(set(wanted)) == len(WORDS)
    for stream in (True, False, False):
        failed, found = asyncio.run(disturbed(stream))
        assert (failed.status, failed.error) == (500, "generation_failed")
        assert found == wanted
    assert asyncio.run(server.seconds_until_idle()) < math.inf
    assert asyncio.run(server.metrics()).value("quire_engine_deaths_total") == 0


def test_broken_connections_leave_nothing_behind(server: Server) -> None:
    num_files = server.num_files()
    row = asyncio.run(cut_links(server, count=40, num_tokens=200))
    measured = {name: value for name, value, _ in row.checks}
    assert measured["healthy"] is True
    assert max(value for value in measured.values() if isinstance(value, float)) < math.inf
    assert asyncio.run(server.metrics()).value("quire_requests_total", finish_reason="abort") > 0
    assert server.num_files() <= num_files + 2
