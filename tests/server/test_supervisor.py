"""The supervisor, with engines that are ready at once."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineConfig, EngineOptions
from quire.errors import EngineDeadError
from quire.server import supervisor
from quire.server.supervisor import EngineState, Supervisor
from tests.engine.builders import make_config

LIMIT_S = 60


class StandInClient:
    """An engine that is ready at once."""

    def __init__(self, on_death: Callable[[EngineDeadError], None]) -> None:
        self.die = on_death
        self.is_replacement: bool | None = None
        started.append(self)

    async def start(self, options: EngineOptions, *, is_replacement: bool = False) -> Any:
        self.is_replacement = is_replacement
        return SimpleNamespace(config=make_config())

    async def stop(self) -> None:
        """Do nothing: no process runs."""

    async def describe_end(self) -> str:
        return "gone"


started: list[StandInClient] = []


async def ignore(config: EngineConfig) -> None:
    """Load nothing."""


def test_only_an_engine_after_the_first_is_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "EngineClient", StandInClient)
    started.clear()

    async def scenario() -> None:
        watched = Supervisor(EngineOptions(), lambda error: None, ignore)
        await watched.start()
        for num_engines in (1, 2):
            started[-1].die(EngineDeadError("gone"))
            assert not watched.is_ready
            while len(started) == num_engines or not watched.is_ready:
                await asyncio.sleep(0)
        await watched.stop()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert [client.is_replacement for client in started] == [False, True, True]


def test_stall_and_silence_count_from_the_last_step_and_the_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now.s))
    watched = Supervisor(EngineOptions(), lambda error: None, ignore)
    client: Any = SimpleNamespace(num_requests=0, progress_s=900.0, last_heard_s=995.0)
    watched._client = client
    assert watched.stall_s() == 0, "the engine starts"
    watched.state = EngineState.READY
    assert (watched.stall_s(), watched.silence_s()) == (0, 5), "an engine without requests does not stall"
    client.num_requests = 1
    now.s += 1
    assert (watched.stall_s(), watched.silence_s()) == (101, 6)
    client.progress_s = client.last_heard_s = now.s
    assert (watched.stall_s(), watched.silence_s()) == (0, 0)
