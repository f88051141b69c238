import asyncio
from types import SimpleNamespace

import pytest

from quire.engine.process.messages import Statistics
from quire.errors import EngineDeadError
from quire.server import health as health_module
from quire.server.health import MAX_STALL_S, Health


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make(num_requests: int = 1) -> tuple[Health, SimpleNamespace, SimpleNamespace, Clock]:
    client = SimpleNamespace(num_requests=num_requests, statistics=Statistics(), last_heard_s=-100.0)
    supervisor = SimpleNamespace(is_ready=True, client=client)
    clock = Clock()
    admission = SimpleNamespace(busy_since_s=clock.now_s)
    return Health(supervisor, admission, clock), supervisor, client, clock


def test_work_that_does_not_move_is_a_stall() -> None:
    health, _, client, clock = make()
    assert health.stall_s() == 0
    clock.now_s += MAX_STALL_S - 1
    assert not health.is_stalled()
    clock.now_s += 1
    assert health.is_stalled()
    client.statistics = Statistics()
    assert health.stall_s() == 0, "a step ended"


def test_no_work_is_no_stall_however_long() -> None:
    health, _, client, clock = make(num_requests=0)
    health.stall_s()
    clock.now_s += 10_000
    assert health.stall_s() == 0
    client.num_requests = 1
    assert health.stall_s() == 0


def test_work_that_came_a_moment_ago_is_no_stall_though_the_last_step_is_long_past() -> None:
    health, _, _, clock = make()
    health.stall_s()
    clock.now_s += 10_000
    health._admission.busy_since_s = clock.now_s - 1
    assert health.stall_s() == 1


def test_an_engine_that_is_being_started_does_not_stall() -> None:
    health, supervisor, _, clock = make()
    health.stall_s()
    supervisor.is_ready = False
    clock.now_s += 10_000
    assert not health.is_stalled()


def test_an_engine_that_answers_is_ready() -> None:
    health, supervisor, client, _ = make()

    async def ping() -> None:
        await asyncio.sleep(0)

    client.ping = ping

    async def main() -> None:
        assert await health.answers()
        supervisor.is_ready = False
        assert not await health.answers()

    asyncio.run(main())


def test_who_was_just_heard_of_is_not_asked() -> None:
    health, _, client, _ = make()

    async def main() -> None:
        client.last_heard_s = asyncio.get_running_loop().time()
        assert await health.answers()  # there is no `ping` to be called

    asyncio.run(main())


def test_an_engine_that_is_silent_is_asked_once_and_is_ready_when_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "MAX_PING_S", 0.1)
    health, _, client, clock = make()
    num_asked = 0

    async def main() -> None:
        answered = asyncio.Event()

        async def ping() -> None:
            nonlocal num_asked
            num_asked += 1
            await answered.wait()

        client.ping = ping
        assert await asyncio.gather(*(health.answers() for _ in range(20))) == [False] * 20
        clock.now_s += 60
        assert not await health.answers()
        assert num_asked == 1
        answered.set()
        await asyncio.sleep(0.01)
        assert await health.answers()

    asyncio.run(main())


def test_an_engine_that_dies_while_asked_is_not_ready() -> None:
    health, _, client, _ = make()

    async def ping() -> None:
        raise EngineDeadError("gone")

    client.ping = ping
    assert asyncio.run(health.answers()) is False
