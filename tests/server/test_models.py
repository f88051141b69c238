"""Loading and unloading by `Models`, with engines that have no process."""

import asyncio
import math
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.process.messages import Statistics
from quire.engine.process.sizes import ModelSize, Sizes
from quire.errors import EngineDeadError, ModelNotFoundError
from quire.server import models as models_module
from quire.server.errors import ApiError
from quire.server.models import Models
from quire.server.options import ServerOptions
from quire.server.state import ServerState
from tests.server.fake_engine import in_loop, record_of

SOON_S = 0.02


class StandInEngines:
    """Engines that take a few turns of the event loop to start and to end."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.options = SimpleNamespace(max_num_seqs=1)
        self.is_ready = self.is_asleep = self.is_restarting = False
        self.error: Exception | None = None

    def rest(self) -> None:
        self.is_ready, self.is_asleep = False, True

    async def sleep(self) -> None:
        self.rest()
        await asyncio.sleep(0)
        self.log.append(f"-{self.name}")

    async def wake_up(self) -> None:
        self.is_asleep = False
        await asyncio.sleep(0)
        if self.error is not None:
            self.rest()
            raise self.error
        self.is_ready = True
        self.log.append(f"+{self.name}")

    @property
    def statistics(self) -> list[Statistics]:
        return [Statistics()]


class Pool:
    """Models of one byte each; `log` has the loads (+a) and ends (-a) of engines."""

    def __init__(self, names: str = "abc", room: float = 2, keep_alive_s: float = math.inf, **options: Any) -> None:
        self.log: list[str] = []
        states = []
        for name in names:
            engines: Any = StandInEngines(name, self.log)
            states.append(ServerState(ServerOptions(**options), name, engines, states[0] if states else None))
        self.models = Models(states, keep_alive_s=keep_alive_s, budget_bytes=room)
        for model in self.models.by_name.values():
            model.num_bytes = 1

    def lease(self, name: str, keep_alive_s: float | None = None) -> Any:
        return self.models.lease(self.models.find(name), record_of(), keep_alive_s)

    async def use(self, name: str, keep_alive_s: float | None = None) -> None:
        async with self.lease(name, keep_alive_s):
            assert self.models.find(name).status == "loaded"

    def loaded(self) -> str:
        return "".join(name for name, model in self.models.by_name.items() if model.holds_memory)


@in_loop
async def test_model_used_least_recently_is_unloaded_for_another() -> None:
    pool = Pool()
    for name in "abac":
        await pool.use(name)
    assert pool.log == ["+a", "+b", "-b", "+c"]
    assert pool.loaded() == "ac"


@in_loop
async def test_requests_of_one_model_share_one_load() -> None:
    pool = Pool()
    await asyncio.gather(*(pool.use("a") for _ in range(10)))
    assert pool.log == ["+a"]


@in_loop
async def test_request_waits_for_room_until_a_model_is_idle() -> None:
    pool = Pool(room=1)
    async with pool.lease("a"):
        waiting = asyncio.create_task(pool.use("b"))
        await asyncio.sleep(SOON_S)
        await pool.use("a")  # a waiting model does not hold up the loaded one at once
        assert (pool.log, pool.models.num_requests) == (["+a"], 1)
    await waiting
    assert pool.log == ["+a", "-a", "+b"]


@in_loop
async def test_model_in_constant_use_is_unloaded_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "PATIENCE_S", SOON_S)
    pool = Pool(room=1)
    order: list[str] = []

    async def use(name: str) -> None:
        async with pool.lease(name):
            order.append(name)
            await asyncio.sleep(SOON_S)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool.lease("a"))
        tasks = [asyncio.create_task(use("b"))]
        await asyncio.sleep(3 * SOON_S)
        tasks.append(asyncio.create_task(use("a")))
        await asyncio.sleep(SOON_S)
        assert order == []  # a's next request waits until b had its turn
    await asyncio.gather(*tasks)
    assert order == ["b", "a"]


@pytest.mark.parametrize(
    ("keep_alive_s", "of_request_s", "is_loaded", "is_loaded_later"),
    [
        (math.inf, None, True, True),
        (2 * SOON_S, None, True, False),
        (0.0, None, False, False),
        (math.inf, 0.0, False, False),
        (0.0, math.inf, True, True),
    ],
)
@in_loop
async def test_idle_model_stays_loaded_for_the_keep_alive_time(
    keep_alive_s: float, of_request_s: float | None, is_loaded: bool, is_loaded_later: bool
) -> None:
    pool = Pool(keep_alive_s=keep_alive_s)
    await pool.use("a", of_request_s)
    for _ in range(5):
        await asyncio.sleep(0)
    assert pool.models.default.holds_memory == is_loaded
    await asyncio.sleep(4 * SOON_S)
    assert pool.models.default.holds_memory == is_loaded_later
    await pool.use("a")


@in_loop
async def test_running_request_keeps_its_model_beyond_the_keep_alive_time() -> None:
    pool = Pool(keep_alive_s=SOON_S)
    async with pool.lease("a"):
        await pool.use("a")
        await asyncio.sleep(3 * SOON_S)
        assert pool.models.default.status == "loaded"


@in_loop
async def test_error_of_loading_reaches_every_request_and_the_next_load_may_succeed() -> None:
    pool = Pool(room=1)
    engines: Any = pool.models.default.engines
    engines.error = ModelNotFoundError("it is gone")
    results = await asyncio.gather(pool.use("a"), pool.use("a"), return_exceptions=True)
    assert [type(result) for result in results] == [ModelNotFoundError] * 2
    await pool.use("b")  # the failed one holds no memory
    engines.error = None
    await pool.use("a")
    assert pool.log == ["+b", "-b", "+a"]


@in_loop
async def test_requests_that_wait_for_a_model_are_bounded_in_number_and_time() -> None:
    pool = Pool(room=1, max_queued_requests=1, queue_timeout_s=2 * SOON_S)
    async with pool.lease("a"):
        tasks = [asyncio.create_task(pool.use("b")) for _ in range(3)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [(error.status, error.code) for error in results if isinstance(error, ApiError)]
    # One may run and one may wait, as with a loaded model.
    assert sorted(errors) == [(429, "queue_full"), (503, "queue_timeout"), (503, "queue_timeout")]
    assert pool.models.num_requests == 0
    await pool.use("b")


@in_loop
async def test_no_model_is_unloaded_for_a_client_that_left() -> None:
    pool = Pool(room=1)
    async with pool.lease("a"):
        waiting = asyncio.create_task(pool.use("b"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
    await asyncio.sleep(SOON_S)
    assert pool.log == ["+a"]
    await pool.use("b")
    assert pool.log == ["+a", "-a", "+b"]


@in_loop
async def test_cancelled_request_leaves_the_load_to_others() -> None:
    pool = Pool()
    first, second = asyncio.create_task(pool.use("a")), asyncio.create_task(pool.use("a"))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert (pool.log, pool.models.num_requests, pool.models.default.num_leases) == (["+a"], 0, 0)


@in_loop
async def test_sleep_lets_requests_finish_and_the_next_one_loads_again() -> None:
    pool = Pool()
    async with pool.lease("a"):
        sleeping = asyncio.create_task(pool.models.sleep(pool.models.default, 60))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(pool.use("a"))
        await asyncio.sleep(SOON_S)
        assert pool.log == ["+a"]
    await asyncio.gather(sleeping, waiting)
    assert pool.log == ["+a", "-a", "+a"]


@in_loop
async def test_sleep_ends_requests_that_take_too_long() -> None:
    pool = Pool()
    async with pool.lease("a"):
        await pool.models.sleep(pool.models.default, SOON_S)
        assert pool.log == ["+a", "-a"]
    await pool.use("a")


@in_loop
async def test_model_that_dies_too_often_is_loaded_anew_by_the_next_request() -> None:
    pool = Pool(room=1)
    await pool.use("a")
    pool.models.note_lost("a", EngineDeadError("gone"))
    assert pool.models.default.status == "unloaded"
    await pool.use("b")
    await pool.use("a")
    assert pool.log == ["+a", "+b", "-b", "+a"]


@in_loop
async def test_models_never_exceed_the_budget_nor_leave_under_a_request() -> None:
    pool = Pool("abcde", room=3, keep_alive_s=0.003)
    num_done = 0

    async def client(index: int) -> None:
        nonlocal num_done
        for turn in range(20):
            name = "abcde"[(index * 7 + turn * 3 + turn * turn * index) % 5]
            async with pool.lease(name, (None, 0.0, math.inf)[(index + turn) % 3]):
                for _ in range(3):
                    assert len(pool.loaded()) <= 3
                    assert pool.models.find(name).status == "loaded"
                    await asyncio.sleep(0.001 * (turn % 2))
            num_done += 1

    await asyncio.gather(*(client(index) for index in range(12)))
    assert num_done == 240
    assert pool.log.count("+a") - pool.log.count("-a") in (0, 1)


@in_loop
async def test_start_measures_the_models_and_loads_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(options: list[Any], budget_bytes: int | None) -> Sizes:
        return Sizes(budget_bytes or 0, [ModelSize(100, 10)] * len(options))

    monkeypatch.setattr(models_module, "measure", measure)
    monkeypatch.setattr(models_module, "replace", lambda options, **values: options)
    pool = Pool(models_memory_bytes=150)
    for model in pool.models.by_name.values():
        model.engines.options.num_blocks_override = None
    await pool.models.start()
    assert pool.log == ["+a"]
    await pool.use("b")
    assert pool.log == ["+a", "-a", "+b"]


def test_every_model_drains_with_the_server() -> None:
    """Streams of events of any model end then."""
    models = Pool("abc").models
    models.is_draining = True
    assert [model.is_draining for model in models.by_name.values()] == [True] * 3
    assert models.is_draining
