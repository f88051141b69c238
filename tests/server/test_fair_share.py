"""`--scheduling-policy fair` through the server: API keys are its clients."""

import asyncio
import threading

from quire.server.keys import KeyRing
from tests.engine.builders import mixing
from tests.server.fake_engine import LIMIT_S, in_loop
from tests.server.served import serving

NUM_OF_MANY, NUM_OF_FEW = 24, 3


async def finished_before_the_last_of_few(policy: str) -> int:
    """Return the requests of a key with many that end before the three of a key that asks after it."""
    ended: list[str] = []
    has_all = threading.Event()

    def next_token(known: list[int], num_prompt_tokens: int, seed: int) -> int:
        assert has_all.wait(LIMIT_S), "requests did not arrive"
        return mixing(known, num_prompt_tokens, seed)

    keys, scheduler = KeyRing({"many": "many", "few": "few"}), {"policy": policy, "max_num_seqs": 1}
    async with serving(keys=keys, scheduler=scheduler, next_token=next_token) as served, asyncio.TaskGroup() as asking:

        async def ask(key: str) -> None:
            answer = await served.chat(headers={"Authorization": f"Bearer {key}"}, max_tokens=16, ignore_eos=True)
            assert answer.status == 200
            ended.append(key)

        for key, count in (("many", NUM_OF_MANY), ("few", NUM_OF_FEW)):
            wanted = served.server_requests() + count
            for _ in range(count):
                asking.create_task(ask(key))
            while served.server_requests() < wanted:
                await asyncio.sleep(0.001)
        has_all.set()
    last_of_few = max(index for index, key in enumerate(ended) if key == "few")
    return ended[:last_of_few].count("many")


@in_loop
async def test_key_with_few_requests_is_not_delayed_by_the_queue_of_another_key() -> None:
    assert await finished_before_the_last_of_few("fair") < NUM_OF_MANY / 2


@in_loop
async def test_fcfs_lets_the_queue_of_another_key_go_first() -> None:
    assert await finished_before_the_last_of_few("fcfs") > NUM_OF_MANY / 2
