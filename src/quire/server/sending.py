"""Bodies of answers, sent in pieces as their clients read them. What a slow client leaves unread waits in a file.

`Gate` sends every body through a `Sending`. Next to read: `connection.py`, which disconnects clients that read nothing.
"""

import asyncio
import os
import tempfile
from typing import IO

from starlette.types import Message, Send

from quire.linux import free_blocks

PIECE_BYTES = 32 << 10
PATIENCE_S = 0.2
"""Time that a client has to take a piece before the rest of its body goes to the file."""
MAX_FILE_BYTES = 1 << 30
BLOCK_BYTES = 64 << 10
"""Bodies begin at multiples of it in the file: a block of the file system never has parts of two."""
UNSHARED = "quire.unshared"
"""Field of messages whose bodies nothing else holds: once they are in the file, their memory is free."""


class Sending:
    """Sends bodies, and holds the file of what the slow clients of a server have not read.

    The file has no name, and no part of it is used twice. Without a directory for temporary files, without room in it,
    or beyond `MAX_FILE_BYTES`, bodies wait in memory.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = self._num_bytes = 0

    async def send(self, send: Send, message: Message) -> None:
        """Send a message, its body in pieces. Mutates: the message, which holds no body then."""
        if len(message.get("body", b"")) <= PIECE_BYTES:
            return await send(message)
        body: bytes = message.pop("body")
        num_bytes, at, may_go = len(body), 0, message.pop(UNSHARED, False)
        while num_bytes - at > PIECE_BYTES:
            try:
                async with asyncio.timeout(PATIENCE_S if may_go else None):
                    await send({**message, "body": body[at : at + PIECE_BYTES], "more_body": True})
            except TimeoutError:
                may_go = False
                if (start := await self._store(body, at)) is not None:
                    body = b""
                    return await self._send_stored(send, message, start, num_bytes - at)
            else:
                at += PIECE_BYTES
        await send({**message, "body": body[at:]})

    async def _send_stored(self, send: Send, message: Message, start: int, num_bytes: int) -> None:
        assert self._file is not None
        descriptor, end, more_body = self._file.fileno(), start + num_bytes, message.get("more_body", False)
        try:
            for at in range(start, end, PIECE_BYTES):
                piece = await asyncio.to_thread(os.pread, descriptor, min(PIECE_BYTES, end - at), at)
                await send({**message, "body": piece, "more_body": more_body or at + PIECE_BYTES < end})
        finally:
            self._free(start, num_bytes)

    async def _store(self, body: bytes, at: int) -> int | None:
        """Write a body from `at` on to the file. Returns: its place there; None if it cannot be."""
        start, num_bytes = self._end, len(body) - at
        if self._num_bytes + num_bytes > MAX_FILE_BYTES:
            return None
        self._end += -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._num_bytes += num_bytes
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # for as long as the server
            data, descriptor = memoryview(body)[at:], self._file.fileno()
            writing = asyncio.get_running_loop().run_in_executor(None, _write, descriptor, data, start)
            await asyncio.shield(writing)
        except OSError:
            self._free(start, num_bytes)
            return None
        except asyncio.CancelledError:  # the client has left; the thread writes on
            writing.add_done_callback(lambda done: self._free(start, num_bytes))
            raise
        return start

    def _free(self, start: int, num_bytes: int) -> None:
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        if self._file is None or free_blocks(self._file.fileno(), start, num_blocks * BLOCK_BYTES):
            self._num_bytes -= num_bytes


def _write(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        num_written = os.pwrite(descriptor, data, start)
        data, start = data[num_written:], start + num_written
