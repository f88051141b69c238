"""Messages of rank 0 through shared memory."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.errors import EngineDeadError
from quire.runtime.links import RankMemory

SPINS = 20
UNTIL_ASLEEP_S = 0.3
"""A waiting rank looks for some 10 ms, then it sleeps."""


@pytest.mark.parametrize(("num_stages", "group_size"), [(1, 3), (2, 1), (2, 2)])
def test_each_rank_gets_its_messages_in_order(num_stages: int, group_size: int) -> None:
    """More than fit into the memory at once, of any length."""
    memory = RankMemory(num_stages, group_size, 1)
    channels = memory.messages(SPINS)
    assert len(channels) == num_stages * group_size - 1
    sizes = [1, 7, 128 << 10, (128 << 10) + 1, 9 << 20, 0, 5] + [100] * 200

    def message(rank: int, index: int) -> bytes:
        return bytes([(rank + index) % 251]) * sizes[index]

    def receive(rank: int) -> None:
        for index in range(len(sizes)):
            assert channels[rank].receive() == message(rank, index)

    with ThreadPoolExecutor(len(channels)) as pool:
        received = [pool.submit(receive, rank) for rank in range(len(channels))]
        for index in range(len(sizes)):
            for rank, channel in enumerate(channels):
                channel.send(message(rank, index))
        for each in received:
            each.result()


def test_sleeping_rank_is_woken_by_a_message_and_by_the_end() -> None:
    memory = RankMemory(1, 2, 1)
    (channel,) = memory.messages(SPINS)
    received: list[bytes] = []
    failed = threading.Event()

    def receive() -> None:
        received.append(channel.receive())
        with pytest.raises(EngineDeadError):
            channel.receive()
        failed.set()

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(UNTIL_ASLEEP_S)
    channel.send(b"step")
    deadline_s = time.monotonic() + 60
    while not received and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert received == [b"step"]
    time.sleep(UNTIL_ASLEEP_S)
    memory.give_up()
    thread.join(60)
    assert failed.is_set()


def test_messages_before_the_end_are_still_read() -> None:
    memory = RankMemory(1, 2, 1)
    (channel,) = memory.messages(SPINS)
    channel.send(b"step")
    memory.give_up()
    assert channel.receive() == b"step"
    with pytest.raises(EngineDeadError):
        channel.receive()
