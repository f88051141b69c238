"""Rows that a rank sends to another through shared memory."""

import threading

import numpy as np
import pytest

from quire.errors import EngineDeadError
from quire.runtime.links import Links, RankMemory
from tests.parallel.thread_ranks import KEPT


def stages(num_stages: int, group_size: int = 1) -> tuple[RankMemory, list[Links]]:
    """Return the memory, and the links of each rank."""
    memory = RankMemory(num_stages, group_size, 1)
    KEPT.append(memory)
    return memory, [memory.links(rank, 0) for rank in range(num_stages * group_size)]


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 576), (2000, 576), (5, 70_000), (0, 8)])
def test_rows_arrive_in_order_also_beyond_the_ring(num_rows: int, width: int) -> None:
    _, (last, first) = stages(2)
    assert first.after is not None
    assert last.before is not None
    sent = [np.random.default_rng(step).standard_normal((num_rows, width + 3)).astype(np.float32) for step in range(4)]

    def send() -> None:
        for rows in sent:
            first.after.send(rows[:, :width])  # type: ignore[union-attr]

    sending = threading.Thread(target=send)
    sending.start()
    for rows in sent:
        received = np.zeros((num_rows, width + 1), np.float32)
        last.before.receive(received[:, :width])
        assert np.array_equal(received[:, :width], rows[:, :width])
    sending.join(60)


def test_steps_are_sent_before_they_are_received() -> None:
    """The stage before goes on with the next step."""
    _, (last, first) = stages(2)
    for step in range(3):
        first.after.send(np.full((8, 64), step, np.float32))  # type: ignore[union-attr]
    for step in range(3):
        rows = np.empty((8, 64), np.float32)
        last.before.receive(rows)  # type: ignore[union-attr]
        assert (rows == step).all()


def test_each_rank_is_linked_to_the_same_rank_of_the_next_stage() -> None:
    _, links = stages(3, 2)
    assert [(each.stage, each.is_last) for each in links] == [(2, True)] * 2 + [(0, False)] * 2 + [(1, False)] * 2
    for rank in (2, 3):
        rows = np.full((1, 4), rank, np.float32)
        links[rank].after.send(rows)  # type: ignore[union-attr]
        links[rank + 2].before.receive(received := np.empty((1, 4), np.float32))  # type: ignore[union-attr]
        assert np.array_equal(received, rows)
        assert (links[rank].before, links[rank - 2].after) == (None, None)


def test_waiting_ends_when_the_ranks_give_up() -> None:
    memory, (last, _) = stages(2)
    raised: list[BaseException] = []

    def receive() -> None:
        try:
            last.before.receive(np.empty((1, 4), np.float32))  # type: ignore[union-attr]
        except EngineDeadError as error:
            raised.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    memory.give_up()
    waiting.join(60)
    assert len(raised) == 1
