"""Faults of the engine and of connections, and short loads, on a real server with a tiny model.

`python -m benchmarks.soak` has the long ones and their limits in time.
"""

import asyncio
import math
from collections.abc import Iterator

import pytest

from benchmarks.soak.client import Manners, Seen, ask, chat_body
from benchmarks.soak.loads import HELLO
from benchmarks.soak.server import Server, serving
from tests.cli.tiny_directory import make_tiny_directory

MAX_NUM_SEQS, QUEUE = 8, 60
WORDS = ("one", "two", "three", "four")
BAD_TOKENS = {"raise-in-step": ("Z", 57), "nan-logits": ("[", 58), "raise-in-output": ("\\", 59)}
"""By fault: a text, and its token."""
NEVER_DRAWN = {str(token): -100 for _, token in BAD_TOKENS.values()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    faults = [f"{name}:token={token}" for name, (_, token) in BAD_TOKENS.items()]
    limits = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-queued-requests", str(QUEUE))
    with serving(str(model), *limits, environment={"QUIRE_FAULTS": ";".join([*faults, "slow-step:ms=3"])}) as running:
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
