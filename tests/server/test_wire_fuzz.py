"""Damaged requests to a running server (B2): it answers or disconnects, and goes on.

`python -m benchmarks.soak --only B2` tries more than the suite does.
"""

import asyncio
import random
import re

import psutil

from benchmarks.soak.wire_cases import make_case
from tests.server.fake_engine import in_loop
from tests.server.served import Served, quick, serving

NUM_CASES = 1200
AT_ONCE = 300
MAX_GROWTH_BYTES = 64 << 20


async def throw(served: Served, data: bytes, *, hangs_up: bool) -> bytes:
    """Send a case in pieces, then wait for the server to hang up, or hang up first."""
    reader, writer = await served.connect()
    received = b""
    try:
        for at in range(0, len(data), 1 + len(data) // 3):
            writer.write(data[at : at + 1 + len(data) // 3])
            await writer.drain()
        if hangs_up:
            writer.write_eof()
        async with asyncio.timeout(60):  # the limits of the connection end it long before
            received = await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.close()
    return received


@in_loop
async def test_damaged_requests_do_not_break_the_server() -> None:
    random_ = random.Random(20_261)
    async with serving(connection=quick(READ_TIMEOUT_S=0.4, KEEP_ALIVE_S=0.2)) as served:
        statuses: set[int] = set()
        before = 0
        for start in range(0, NUM_CASES, AT_ONCE):
            cases = [make_case(random_) for _ in range(min(AT_ONCE, NUM_CASES - start))]
            answers = await asyncio.gather(*(throw(served, case, hangs_up=random_.random() < 0.2) for case in cases))
            for case, answer in zip(cases, answers, strict=True):
                found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]
                assert not [status for status in found if status >= 500], (case, answer)
                statuses |= set(found)
            if start == AT_ONCE:
                before = psutil.Process().memory_info().rss
        assert {200, 400, 403, 404, 405} <= statuses
        assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
        await served.until_idle()
        assert (await served.chat()).status == 200
        assert served.server_requests() == 0
