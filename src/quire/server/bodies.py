"""`BodyMemory`: memory that the bodies of all requests may take together, divided among clients.

`Gate` takes room before it reads a body, and gives it back when the request is over: what is made of a body may be as
large as the body. Next to read: `gate.py`.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from quire.server.errors import ApiError

SMALL_BYTES = 16 << 10
"""Bodies up to this size are not counted: those of 4096 connections take at most 64 MiB."""
ALL_BYTES = 128 << 20
NUM_LARGEST = 8
"""Bodies of `--max-body-bytes` that have room, if that is more than `ALL_BYTES`."""
MAX_WAITING = 64
WAIT_S = 5.0


class BodyMemory:
    """Room for large bodies. No client gets more than is left for all others: half of it alone, a third beside another.

    A body without room waits, and its client can send no more of it meanwhile. It is refused after `WAIT_S`, and if
    `MAX_WAITING` bodies wait.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._num_free = max(ALL_BYTES, NUM_LARGEST * max_body_bytes)
        self._held: Counter[str] = Counter()
        self._waiting: dict[Room, tuple[int, asyncio.Future[None]]] = {}

    @contextmanager
    def room_of(self, client_id: str) -> Iterator["Room"]:
        """Yield the room of one request, and give it back at the end."""
        room = Room(self, client_id)
        try:
            yield room
        finally:
            room.keep(0)

    async def take(self, room: "Room", num_bytes: int) -> None:
        """Enlarge a room. Raises: ApiError 429 if there is no memory for it in time."""
        if self._grant(room, num_bytes):
            return
        if len(self._waiting) < MAX_WAITING:
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[room] = num_bytes, granted
            try:
                async with asyncio.timeout(WAIT_S):
                    return await granted
            except TimeoutError:
                pass
            finally:
                self._waiting.pop(room, None)
        message = f"this client's requests hold {self._held[room.client_id] >> 20} MiB, and no more is free for it now"
        raise ApiError(429, message, code="too_many_large_bodies", retry_after_s=2)

    def give_back(self, room: "Room", num_bytes: int) -> None:
        """Make a room smaller; bodies that wait get what is free, in the order in which they came."""
        self._change(room, -num_bytes)
        for waiting, (wanted, granted) in [*self._waiting.items()]:
            if not granted.done() and self._grant(waiting, wanted):
                granted.set_result(None)

    def _grant(self, room: "Room", num_bytes: int) -> bool:
        if self._held[room.client_id] + num_bytes > self._num_free:
            return False
        self._change(room, num_bytes)
        return True

    def _change(self, room: "Room", num_bytes: int) -> None:
        room.num_bytes += num_bytes
        self._num_free -= num_bytes
        self._held[room.client_id] += num_bytes
        if not self._held[room.client_id]:
            del self._held[room.client_id]


class Room:
    """Memory of one request's body."""

    def __init__(self, bodies: BodyMemory, client_id: str) -> None:
        self.client_id = client_id
        self.num_bytes = 0
        self._bodies = bodies

    async def take(self, num_bytes: int) -> None:
        """Take memory for a body. Raises: ApiError 429 if there is none in time."""
        await self._bodies.take(self, num_bytes)

    def keep(self, num_bytes: int) -> None:
        """Give back all but `num_bytes`."""
        if num_bytes < self.num_bytes:
            self._bodies.give_back(self, self.num_bytes - num_bytes)
