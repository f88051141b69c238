"""Requests with grammars are prepared in a thread of their own, clients in turns, and those that were dropped not."""

import threading
from collections.abc import Iterator

import pytest

from quire.engine.process.messages import Submit
from quire.engine.process.preparation import GrammarThread
from quire.errors import EngineDeadError
from quire.sampling_params import SamplingParams
from quire.types import RequestSpec
from tests.processes import LIMIT_S, wait_until


class Slow:
    """Preparation that waits before each request until it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self._turn = threading.Semaphore(0)
        self.has_room = True
        self.thread = GrammarThread(
            self._prepare, lambda: self.has_room, lambda request_id: self.ended.append(f"abort {request_id}")
        )

    def _prepare(self, message: Submit) -> None:
        self.begun.append(message.spec.request_id)
        assert self._turn.acquire(timeout=LIMIT_S)
        self.ended.append(message.spec.request_id)

    def add(self, *names: str) -> None:
        for name in names:
            params = SamplingParams()
            self.thread.add(Submit(RequestSpec(name, [1], params, max_tokens=1, seed=0, client_id=name[0])))

    def end(self, count: int = 1) -> None:
        for _ in range(count):
            self._turn.release()

    def until_begun(self, name: str) -> None:
        wait_until(lambda: self.begun and self.begun[-1] == name, lambda: str(self.begun))


@pytest.fixture
def slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.end(100)


def test_clients_take_turns(slow: Slow) -> None:
    slow.add("a0", "a1", "a2")
    slow.until_begun("a0")
    slow.add("b0", "b1", "c0")
    slow.end(6)
    wait_until(lambda: len(slow.ended) == 6)
    assert slow.ended == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_dropped_request_is_not_prepared_and_one_under_way_is_aborted_afterwards(slow: Slow) -> None:
    slow.add("a0", "a1", "a2")
    slow.until_begun("a0")
    assert slow.thread.drop("a1")
    assert slow.thread.drop("a0")
    assert not slow.thread.drop("another")
    slow.end(2)
    wait_until(lambda: len(slow.ended) == 3)
    assert slow.ended == ["a0", "abort a0", "a2"]
    assert not slow.thread.drop("a2")


def test_request_is_prepared_when_there_is_room(slow: Slow) -> None:
    slow.has_room = False
    slow.add("a0", "a1")
    assert slow.thread.drop("a0")
    assert slow.thread.drop("a1")
    slow.has_room = True
    slow.add("a2")
    slow.end()
    wait_until(lambda: slow.ended == ["a2"])


def test_thread_ends_with_the_engine() -> None:
    def prepare(message: Submit) -> None:
        raise EngineDeadError("it ended")

    thread = GrammarThread(prepare, lambda: True, print)
    thread.add(Submit(RequestSpec("a", [1], SamplingParams(), max_tokens=1, seed=0)))
    assert thread._thread is not None
    thread._thread.join(LIMIT_S)
    assert not thread._thread.is_alive()
