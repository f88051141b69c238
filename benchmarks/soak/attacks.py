"""Slow attacks (L7): hundreds of connections that send or read just enough to stay, beside a probe and a chat.

Three kinds, as `slowhttptest` has them: headers that never end, a body that never ends, whole answers that are hardly
read. Streams that are hardly read while they are made are L5.
An attacker that is dropped comes back at once. Next to read: `client.py`, `src/quire/server/connection.py`.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from benchmarks.soak.client import CHAT, Seen, ask, chat_body, get
from benchmarks.soak.loads import HELLO, background
from benchmarks.soak.row import Row, at_percent

LARGE_PATH = "/openapi.json"
PIPELINED = 8
"""Number of large answers that exceed the kernel's buffers."""
SETTLE_S = 2.0
"""Time that the client itself needs to notice that it was dropped."""


class Attack:
    """A kind of attacker and the durations of its connections."""

    def __init__(self, url: str, start: bytes, drop: bytes, *, every_s: float) -> None:
        parts = urlsplit(url)
        self._address = (str(parts.hostname), parts.port or 80)
        self._start = start.replace(b"HOST", parts.netloc.encode())
        self._drop = drop
        self._every_s = every_s
        self.lasted_s: list[float] = []
        self.num_refused = 0

    async def attacker(self, end_s: float) -> None:
        """Attack until then, again and again. Mutates: what lasted how long."""
        while time.perf_counter() < end_s:
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                connection.setblocking(False)
                if not self._drop:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                await asyncio.get_running_loop().sock_connect(connection, self._address)
                begin_s = time.perf_counter()
                was_dropped = await self._hold(connection, end_s)
                # One that is still there when the attack ends counts with its age.
                self.lasted_s.append(time.perf_counter() - begin_s)
                if not was_dropped:
                    return
            except OSError:
                self.num_refused += 1
                await asyncio.sleep(0.1)
            finally:
                connection.close()

    async def _hold(self, connection: socket.socket, end_s: float) -> bool:
        """Returns: whether the server hung up."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(connection, self._start)
            while time.perf_counter() < end_s:
                if self._drop:
                    connection.send(self._drop)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._every_s):
                            while await loop.sock_recv(connection, 4096):
                                pass  # the refusal, before the end
                            return True
                else:
                    await asyncio.sleep(self._every_s)
                    # A reset is known at once; reading would first come to the end of what is there.
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        return True
                    with contextlib.suppress(BlockingIOError):
                        if not connection.recv(1):
                            return True
        except OSError:
            return True
        return False


def attacks_on(url: str, *, every_s: float) -> dict[str, Attack]:
    """The three kinds."""
    head = b"POST %s HTTP/1.1\r\nHost: HOST\r\nContent-Type: application/json\r\n" % CHAT.encode()
    read = b"GET %s HTTP/1.1\r\nHost: HOST\r\n\r\n" % LARGE_PATH.encode()
    return {
        "headers": Attack(url, head, b"X-A: b\r\n", every_s=every_s),
        "body": Attack(url, head + b"Content-Length: 100000\r\n\r\n", b" ", every_s=every_s),
        "read": Attack(url, read * PIPELINED, b"", every_s=every_s),
    }


async def slow_attacks(
    url: str,
    *,
    count: int = 500,
    duration_s: float = 240.0,
    every_s: float = 3.0,
    limit_s: float = 20.0,
    max_tokens: int = 64,
) -> Row:
    """L7: `count` attackers of each kind. Each must be dropped within `limit_s`; other clients must be served."""
    row = Row("L7", f"slow headers, body, read: {count} connections each, {duration_s:g} s")
    looks: list[Seen] = []
    chats: list[Seen] = []
    await ask(url, HELLO)
    kinds = attacks_on(url, every_s=every_s)
    end_s = time.perf_counter() + duration_s
    body = chat_body("Tell me a story.", max_tokens)
    watchers = (
        _again(end_s, 0.5, looks, lambda: get(url, "/health/ready", timeout_s=5)),
        _again(end_s, 0.0, chats, lambda: ask(url, body)),
    )
    async with background(*(kind.attacker(end_s + every_s) for kind in kinds.values() for _ in range(count))) as tasks:
        await asyncio.gather(*watchers)
        await asyncio.wait(tasks, timeout=2 * every_s + 10)
    for name, kind in kinds.items():
        longest_s = max(kind.lasted_s, default=0.0)
        is_judged = duration_s > limit_s
        note = "" if is_judged else "; not judged, the attack was shorter"
        passes = not is_judged or (bool(kind.lasted_s) and longest_s <= limit_s + SETTLE_S)
        row.check(f"slow {name} dropped after s at most (≤ {limit_s:g}{note})", longest_s, passes=passes)
        row.note("connections", len(kind.lasted_s) + kind.num_refused)
        row.check("could not connect", kind.num_refused, passes=not kind.num_refused)
    failed = sum(item.status != 200 for item in looks)
    row.check(f"probes failed of {len(looks)}", failed, passes=bool(looks) and not failed)
    row.note("probe p99 ms", 1e3 * at_percent([item.took_s for item in looks], 99))
    bad = sum(not item.is_good for item in chats)
    row.check(f"chats failed of {len(chats)}", bad, passes=bool(chats) and not bad)
    return row


async def _again(end_s: float, pause_s: float, into: list[Seen], look: Callable[[], Coroutine[Any, Any, Seen]]) -> None:
    while time.perf_counter() < end_s:
        into.append(await look())
        await asyncio.sleep(pause_s)
