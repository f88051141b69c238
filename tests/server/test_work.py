"""Threads of the server: turns of callers, bounds, cancellation, and kinds of work apart."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from quire.errors import QueueFullError
from quire.server.request_record import Caller
from quire.server.work import LEAST_BYTES, LONG_BYTES, FairPool, Work
from tests.server.fake_engine import LIMIT_S, in_loop


class Gates:
    """Jobs that note their begin and wait until they are let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._open: dict[str, threading.Event] = {}

    def job(self, name: str) -> Callable[[], str]:
        self._open[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            assert self._open[name].wait(LIMIT_S)
            return name

        return work

    def open(self, *names: str) -> None:
        for name in names:
            self._open[name].set()

    async def until_begun(self, *names: str) -> None:
        while not set(names) <= set(self.begun):
            await asyncio.sleep(0.001)


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.open(*gates._open)


@in_loop
async def test_job_of_another_caller_begins_beside_a_queue(gates: Gates) -> None:
    pool = FairPool("test")
    tasks = [asyncio.create_task(pool.run("a", gates.job(f"a{number}"))) for number in range(3)]
    await gates.until_begun("a0")
    tasks.append(asyncio.create_task(pool.run("b", gates.job("b0"))))
    await gates.until_begun("b0")
    assert gates.begun == ["a0", "b0"], "a caller's jobs run one at a time"
    gates.open("b0", "a0", "a1", "a2")
    assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "b0"]


@in_loop
async def test_callers_take_turns(gates: Gates) -> None:
    pool = FairPool("test")
    names = ["a0", "a1", "a2", "b0", "b1", "c0", "c1"]
    tasks = [asyncio.create_task(pool.run(name[0], gates.job(name))) for name in names]
    await gates.until_begun("a0", "b0")
    for ends, begins in (("a0", "c0"), ("b0", "a1"), ("c0", "b1"), ("a1", "c1"), ("b1", "a2")):
        gates.open(ends)
        await gates.until_begun(begins)
    gates.open("c1", "a2")
    assert await asyncio.gather(*tasks) == names
    assert gates.begun[2:] == ["c0", "a1", "b1", "c1", "a2"]
    assert not pool._waiting
    assert not pool._num_bytes
    assert not pool._running


@in_loop
async def test_job_that_is_cancelled_while_it_waits_is_never_called(gates: Gates) -> None:
    pool = FairPool("test")
    tasks = [asyncio.create_task(pool.run("a", gates.job(name))) for name in ("first", "left", "last")]
    await gates.until_begun("first")
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    gates.open("first", "last")
    assert [await tasks[0], await tasks[2]] == ["first", "last"]
    assert gates.begun == ["first", "last"]


@in_loop
async def test_thread_of_a_job_that_is_cancelled_while_it_runs_is_free_at_its_end(gates: Gates) -> None:
    pool = FairPool("test")
    left = asyncio.create_task(pool.run("a", gates.job("left")))
    await gates.until_begun("left")
    left.cancel()
    await asyncio.wait([left])
    following = asyncio.create_task(pool.run("a", gates.job("following")))
    await asyncio.sleep(0)
    assert gates.begun == ["left"]
    gates.open("left", "following")
    assert await following == "following"


@in_loop
async def test_error_of_a_job_is_its_callers_only() -> None:
    pool = FairPool("test")

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await pool.run("a", fail)
    assert await pool.run("a", lambda: 1) == 1


@in_loop
async def test_waiting_bytes_are_bounded_in_all_and_per_caller(gates: Gates) -> None:
    pool = FairPool("test", max_waiting_bytes=8 * LEAST_BYTES)
    tasks = []

    async def add(caller: str, num_bytes: int = 0) -> None:
        tasks.append(asyncio.create_task(pool.run(caller, gates.job(f"{caller}{len(tasks)}"), num_bytes)))
        await asyncio.sleep(0)

    await add("a")
    await add("a", 100 * LEAST_BYTES)  # alone it may be larger than the bound
    with pytest.raises(QueueFullError):
        await pool.run("a", gates.job("refused"))
    tasks.pop().cancel()
    await asyncio.sleep(0)
    for _ in range(6):
        await add("a")
    with pytest.raises(QueueFullError):
        await pool.run("a", gates.job("refused"))
    await add("b")
    for _ in range(2):
        await add("b")
    with pytest.raises(QueueFullError):
        await pool.run("c", gates.job("refused"))
    gates.open(*gates._open)
    await asyncio.gather(*tasks)
    assert "refused" not in gates.begun


@in_loop
async def test_short_work_waits_neither_for_long_work_nor_for_grammars_nor_for_answers(gates: Gates) -> None:
    work, caller = Work(), Caller("a")
    long_caller = Caller("a", num_bytes=LONG_BYTES + 1)
    tasks = [
        asyncio.create_task(work.prepare(long_caller, gates.job("long"))),
        asyncio.create_task(work.check_grammar(caller, gates.job("grammar"))),
        asyncio.create_task(work.write("a", gates.job("answer"))),
    ]
    await gates.until_begun("long", "grammar", "answer")
    assert await work.prepare(caller, lambda: "short") == "short"
    gates.open("long", "grammar", "answer")
    await asyncio.gather(*tasks)
