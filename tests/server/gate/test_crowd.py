import asyncio
import json
import time

import pytest

from quire.server.gate.crowd import COMPUTING_PATHS
from quire.server.gate.keys import KeyRing
from tests.server.served import CHAT, Answer, Served, chat_body, serving
from tests.server.test_metrics import samples, value


async def fill(served: Served) -> "list[asyncio.Task[Answer]]":
    """One request that runs slowly, and one that waits: all places are taken."""
    served.executor.in_step = lambda step: time.sleep(0.01)
    tasks = [asyncio.create_task(served.chat(max_tokens=100, ignore_eos=True)) for _ in range(2)]
    for _ in range(500):
        if served.server_requests() == 2:
            return tasks
        await asyncio.sleep(0.01)
    raise AssertionError("the places are not taken")


def test_a_full_server_reads_no_bodies_of_what_would_wait() -> None:
    async def main() -> None:
        async with serving(scheduler={"max_num_seqs": 1}, max_queued_requests=1) as served:
            tasks = await fill(served)
            for path in sorted(COMPUTING_PATHS):
                # Nobody looks at what it says, nor waits until it is there.
                answer = await served.answer("POST", path, headers={"Content-Length": "1000"}, body=b"{no JSON")
                assert (answer.status, answer.code) == (429, "queue_full")
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["x-request-id"].startswith("req-")
            assert (await served.answer("GET", "/v1/models")).status == 200
            assert (await served.answer("POST", "/tokenize", body={"prompt": "hi"})).status == 200
            assert (await served.answer("POST", "/nowhere", body={})).status == 404
            found = await samples(served)
            assert value(found, "quire_http_requests_total", method="POST", route=CHAT, status="429") == 1
            assert value(found, "quire_refused_requests_total", reason="queue_full") == len(COMPUTING_PATHS)
            assert [answer.status for answer in await asyncio.gather(*tasks)] == [200, 200]
            assert (await served.answer("POST", CHAT, body=b"{no JSON")).status == 400

    asyncio.run(main())


def test_strangers_do_not_learn_that_it_is_full() -> None:
    async def main() -> None:
        async with serving(keys=KeyRing({"k": None}), scheduler={"max_num_seqs": 1}, max_queued_requests=1) as served:
            served.executor.in_step = lambda step: time.sleep(0.01)
            key = {"Authorization": "Bearer k"}
            tasks = [asyncio.create_task(served.chat(headers=key, max_tokens=100, ignore_eos=True)) for _ in range(2)]
            while served.server_requests() < 2:
                await asyncio.sleep(0.01)
            assert (await served.chat()).status == 401
            assert (await served.chat(headers=key)).status == 429
            await asyncio.gather(*tasks)

    asyncio.run(main())


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_refusal_leaves_the_connection_as_it_was(is_kept: bool) -> None:
    async def main() -> None:
        async with serving(scheduler={"max_num_seqs": 1}, max_queued_requests=1) as served:
            tasks = await fill(served)

            body = json.dumps(chat_body()).encode()
            connection = b"keep-alive" if is_kept else b"close"
            head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n" % (CHAT.encode(), connection)
            request = head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            reader, writer = await served.connect()
            for _ in range(3 if is_kept else 1):
                writer.write(request)
                async with asyncio.timeout(10):
                    answer = await reader.readuntil(b"}}")
                assert answer.startswith(b"HTTP/1.1 429 ")
            if not is_kept:
                async with asyncio.timeout(10):
                    assert await reader.read() == b""
            writer.close()
            await asyncio.gather(*tasks)

    asyncio.run(main())
