"""`--scheduling-policy fair` through the server: API keys are its clients."""

import asyncio

from quire.server.keys import KeyRing
from tests.server.fake_engine import in_loop
from tests.server.served import serving

NUM_REQUESTS = 24


async def finished_before_the_last_of_few(policy: str) -> int:
    """Return the requests of a key with many that end before the three of a key that asks for one after another."""
    num_ended = 0
    keys = KeyRing({"many": "many", "few": "few"})
    async with serving(keys=keys, scheduler={"policy": policy, "max_num_seqs": 1}) as served:

        async def ask(key: str) -> None:
            nonlocal num_ended
            answer = await served.chat(headers={"Authorization": f"Bearer {key}"}, max_tokens=16, ignore_eos=True)
            assert answer.status == 200
            num_ended += key == "many"

        many = [asyncio.create_task(ask("many")) for _ in range(NUM_REQUESTS)]
        while len(served.supervisor.the_client.engine.scheduler.requests.by_id) < NUM_REQUESTS - num_ended:
            await asyncio.sleep(0.001)
        already = num_ended
        for _ in range(3):
            await ask("few")
        found = num_ended - already
        await asyncio.gather(*many)
    return found


@in_loop
async def test_key_with_one_request_is_not_delayed_by_the_queue_of_another_key() -> None:
    assert await finished_before_the_last_of_few("fair") < NUM_REQUESTS / 2


@in_loop
async def test_fcfs_lets_the_queue_of_another_key_go_first() -> None:
    assert await finished_before_the_last_of_few("fcfs") > NUM_REQUESTS / 2
