import asyncio
from types import SimpleNamespace

import pytest

from quire.errors import EngineDeadError
from quire.server import health as health_module
from quire.server.health import LOOK_EVERY_S, MAX_SILENT_S, MAX_STALL_S, Health
from tests.server.fake_engine import in_loop


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make(num_requests: int = 1) -> tuple[Health, SimpleNamespace, SimpleNamespace, Clock]:
    """An engine that has just made a step."""
    clock = Clock()
    client = SimpleNamespace(num_requests=num_requests, progress_s=clock.now_s, last_heard_s=clock.now_s)
    supervisor = SimpleNamespace(is_ready=True, client=client)
    return Health(supervisor, clock), supervisor, client, clock


def pass_time(health: Health, clock: Clock, seconds: float) -> None:
    """Let time pass as `watch` sees it."""
    for _ in range(round(seconds / LOOK_EVERY_S)):
        health._look()
        clock.now_s += LOOK_EVERY_S


def test_first_probe_sees_a_stall() -> None:
    health, _, client, clock = make()
    clock.now_s += MAX_STALL_S - 1
    assert not health.is_stalled()
    clock.now_s += 1
    assert health.is_stalled()
    assert health.stall_s() == MAX_STALL_S
    client.progress_s = clock.now_s
    assert health.stall_s() == 0, "a step ended"


def test_server_without_requests_does_not_stall() -> None:
    health, _, client, clock = make(num_requests=0)
    clock.now_s += 10_000
    assert health.stall_s() == 0
    client.num_requests, client.progress_s = 1, clock.now_s
    clock.now_s += 1
    assert health.stall_s() == 1


@in_loop
async def test_idle_engine_that_answers_pings_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "LOOK_EVERY_S", 0.001)
    health, _, client, clock = make(num_requests=0)
    num_asked = 0

    async def ping() -> None:
        nonlocal num_asked
        num_asked += 1
        client.last_heard_s = clock.now_s
        clock.now_s += 1

    client.ping = ping
    client.last_heard_s = clock.now_s - 1
    watching = asyncio.create_task(health.watch())
    async with asyncio.timeout(20):
        while num_asked < 15:
            await asyncio.sleep(0.001)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert health.answers()


@in_loop
async def test_silent_engine_is_pinged_once_and_ready_when_it_answers() -> None:
    health, _, client, clock = make()
    num_asked = 0
    answered = asyncio.Event()

    async def ping() -> None:
        nonlocal num_asked
        num_asked += 1
        await answered.wait()
        client.last_heard_s = clock.now_s

    client.ping = ping
    for _ in range(7):
        pass_time(health, clock, 1)
        await asyncio.sleep(0)
        assert health.answers()
    clock.now_s += MAX_SILENT_S - 7
    assert not health.answers()
    assert health.silence_s() == MAX_SILENT_S
    assert num_asked == 1
    answered.set()
    await asyncio.sleep(0.01)
    assert health.answers()


@in_loop
async def test_engine_that_dies_during_a_ping_raises_nothing() -> None:
    health, _, client, clock = make()

    async def ping() -> None:
        raise EngineDeadError("gone")

    client.ping = ping
    for _ in range(20):
        pass_time(health, clock, 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not health.answers()
