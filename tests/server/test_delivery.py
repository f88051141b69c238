"""Who must take an answer, and how fast, over real sockets. Times are shortened; asserted is who is cut, not when."""

import asyncio
import socket
import time
from collections.abc import Callable

import pytest

from quire.server.delivery import Delivery

LARGE = bytes(1 << 19)
TINY_BUFFER_BYTES = 4096


class Answering(asyncio.Protocol):
    """Writes what the test tells it to each client, and notes who is gone."""

    def __init__(self, answer: Callable[["Answering"], None], *, unfinished_s: float, finished_s: float) -> None:
        self._answer = answer
        self._times_s = {"unfinished_s": unfinished_s, "finished_s": finished_s}
        self.is_over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=1 << 10)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, TINY_BUFFER_BYTES)
        self.delivery = Delivery(transport, asyncio.get_running_loop(), **self._times_s)
        self._answer(self)

    def pause_writing(self) -> None:
        self.delivery.pause()

    def resume_writing(self) -> None:
        self.delivery.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.delivery.stop()
        self.is_over.set()


def finished(connection: Answering) -> None:
    connection.transport.write(LARGE)
    connection.delivery.finish()


def unfinished(connection: Answering) -> None:
    connection.transport.write(LARGE)


def play(
    answer: Callable[[Answering], None], *, unfinished_s: float, finished_s: float, chunk_bytes: int, pause_s: float
) -> tuple[int, bool]:
    """Let a client read so much at a time. Returns: what it got, and whether it was cut off before it had all."""

    async def main() -> tuple[int, bool]:
        loop = asyncio.get_running_loop()
        made: list[Answering] = []

        def make() -> Answering:
            made.append(Answering(answer, unfinished_s=unfinished_s, finished_s=finished_s))
            return made[0]

        server = await loop.create_server(make, "127.0.0.1", 0)
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_BUFFER_BYTES)
            await loop.sock_connect(client, server.sockets[0].getsockname())
            num_read, end_s = 0, time.monotonic() + 20
            while num_read < len(LARGE) and time.monotonic() < end_s:
                await asyncio.sleep(pause_s)
                if made and made[0].is_over.is_set():
                    break
                try:
                    num_read += len(await loop.sock_recv(client, chunk_bytes))
                except ConnectionError:
                    break
            was_cut = num_read < len(LARGE) and made[0].is_over.is_set()
        server.close()
        return num_read, was_cut

    return asyncio.run(main())


def test_a_finished_answer_that_is_hardly_read_is_cut() -> None:
    _, was_cut = play(finished, unfinished_s=60, finished_s=0.3, chunk_bytes=1, pause_s=0.02)
    assert was_cut


def test_an_answer_that_is_still_made_waits_longer() -> None:
    _, was_cut = play(unfinished, unfinished_s=0.3, finished_s=60, chunk_bytes=1, pause_s=0.02)
    assert was_cut
    num_read, was_cut = play(unfinished, unfinished_s=60, finished_s=0.01, chunk_bytes=1 << 14, pause_s=0.01)
    assert (num_read, was_cut) == (len(LARGE), False)


def test_who_reads_a_finished_answer_slowly_but_steadily_gets_all_of_it() -> None:
    num_read, was_cut = play(finished, unfinished_s=0.01, finished_s=0.5, chunk_bytes=1 << 14, pause_s=0.01)
    assert (num_read, was_cut) == (len(LARGE), False)


class Held(asyncio.Transport):
    """So many bytes wait, as the test says."""

    num_waiting = 0
    is_cut = False

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def abort(self) -> None:
        self.is_cut = True


@pytest.mark.parametrize("has_taken_all", [False, True])
def test_who_has_taken_all_and_asks_for_a_stream_owes_nothing(has_taken_all: bool) -> None:
    async def main() -> None:
        transport = Held()
        delivery = Delivery(transport, asyncio.get_running_loop(), unfinished_s=60, finished_s=0.01)
        transport.num_waiting = 10_000
        delivery.finish()
        transport.num_waiting = 0 if has_taken_all else 10_000
        delivery.ask()
        transport.num_waiting = 20_000  # of the next answer
        await asyncio.sleep(0.1)
        assert transport.is_cut is not has_taken_all
        delivery.stop()

    asyncio.run(main())
