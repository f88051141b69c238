"""Unique ids, salts, user agents and paths of clients leave nothing in memory."""

import asyncio
import gc

import psutil

from quire.server.keys import KeyRing
from tests.server.fake_engine import in_loop
from tests.server.served import serving

NUM_WARM_UP = 100
NUM_REQUESTS = 300
MAX_GROWTH_BYTES = 24 << 20


@in_loop
async def test_unique_ids_and_salts_leave_nothing_behind() -> None:
    async with serving(keys=KeyRing({"k": "ann"}), requests_per_minute=10**6) as served:

        async def ask(number: int) -> int:
            headers = {"Authorization": "Bearer k", "X-Request-Id": f"id-{number}", "User-Agent": f"agent-{number}"}
            fields = {"cache_salt": f"salt-{number}" + "s" * 200, "request_id": f"mine-{number}", "max_tokens": 2}
            answer = await served.chat(headers=headers, text=f"prompt {number}", **fields)
            await served.answer("GET", f"/nowhere/{number}", headers=headers)
            return answer.status

        async def ask_all(numbers: range) -> None:
            for start in range(numbers.start, numbers.stop, 10):
                assert await asyncio.gather(*map(ask, range(start, start + 10))) == [200] * 10

        async def page() -> bytes:
            return (await served.answer("GET", "/metrics", headers={"Authorization": "Bearer k"})).body

        await ask_all(range(NUM_WARM_UP))
        gc.collect()
        before = psutil.Process().memory_info().rss
        await page()
        num_lines = (await page()).count(b"\n")
        await ask_all(range(NUM_WARM_UP, NUM_WARM_UP + NUM_REQUESTS))
        await served.until_idle()
        gc.collect()
        assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
        assert (await page()).count(b"\n") == num_lines
        admission, client = served.state.admission, served.supervisor.the_client
        assert set(admission.rates._limits) <= {"ann", "anonymous"}
        assert not admission._held
        assert not client._streams
        assert not len(client.engine.events)


@in_loop
async def test_keys_do_not_share_the_prefix_cache() -> None:
    async with serving(keys=KeyRing({"one": None, "two": None})) as served:

        async def cached(key: str) -> int:
            answer = await served.chat(headers={"Authorization": f"Bearer {key}"}, text="a prompt of some length")
            return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached("one") == 0
        assert await cached("one") > 0
        assert await cached("two") == 0
        assert await cached("two") > 0
