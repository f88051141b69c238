"""Many slow or idle clients at once beside ordinary ones (L6, L7), small enough for every run."""

import asyncio
import contextlib

import psutil

from tests.server.served import CHAT, Served, quick, serving

NUM_ATTACKERS = 120
DRIPS = {
    "headers": (b"GET /version HTTP/1.1\r\nHost: localhost\r\n", b"X-A: b\r\n"),
    "body": (b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n" % CHAT.encode(), b"a"),
    "chunks": (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode(),
        b"1\r\na\r\n",
    ),
}


async def drip(served: Served, start: bytes, drop: bytes) -> bool:
    """Send a request that never ends, drop by drop. Returns: whether the server hung up."""
    reader, writer = await served.connect()
    with contextlib.suppress(ConnectionError):
        writer.write(start)
        for _ in range(200):
            if reader.at_eof() or writer.is_closing():
                break
            writer.write(drop)
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await reader.read(1000)
    hung_up = reader.at_eof() or reader.exception() is not None
    writer.close()
    return hung_up


def test_slow_attackers_are_dropped_and_nobody_else_notices() -> None:
    async def main() -> None:
        with quick(READ_TIMEOUT_S=1.0, LINGER_S=0.2) as connection:
            async with serving(connection=connection) as served:
                kinds = list(DRIPS.values()) * (NUM_ATTACKERS // len(DRIPS))
                attack = [asyncio.create_task(drip(served, *kind)) for kind in kinds]
                statuses = []
                for _ in range(10):
                    statuses.append((await served.answer("GET", "/health/live")).status)
                    statuses.append((await served.chat()).status)
                    await asyncio.sleep(0.05)
                assert statuses == [200] * 20
                assert await asyncio.gather(*attack) == [True] * NUM_ATTACKERS
                assert served.server_requests() == 0

    asyncio.run(main())


def test_connections_that_come_and_go_leave_no_files_open() -> None:
    async def main() -> None:
        async with serving() as served:
            await served.answer("GET", "/version")
            before = psutil.Process().num_fds()
            for _ in range(20):
                pairs = await asyncio.gather(*(served.connect() for _ in range(25)))
                for at, (_, writer) in enumerate(pairs):
                    if at % 2:
                        writer.write(b"GET /version HT")
                    writer.close()
                assert (await served.answer("GET", "/version")).status == 200
            for _ in range(200):
                if not served.server.server_state.connections:
                    break
                await asyncio.sleep(0.02)
            assert not served.server.server_state.connections
            assert psutil.Process().num_fds() <= before + 2

    asyncio.run(main())
