import asyncio
import time

import pytest

from quire import __version__
from quire.server.supervisor import EngineState
from tests.server.served import serving


def test_probes_of_a_server_that_is_well() -> None:
    async def main() -> None:
        async with serving() as served:
            for path in ("/health/live", "/health/ready", "/health", "/ping"):
                assert (await served.answer("GET", path)).status == 200
            assert (await served.answer("GET", "/version")).json == {"version": __version__}

    asyncio.run(main())


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.RESTARTING, EngineState.STOPPED])
def test_without_an_engine_the_server_lives_but_is_not_ready(state: EngineState) -> None:
    async def main() -> None:
        async with serving() as served:
            served.supervisor.state = state
            assert (await served.answer("GET", "/health/live")).status == 200
            for path in ("/health/ready", "/health", "/ping"):
                answer = await served.answer("GET", path)
                assert (answer.status, answer.code) == (503, "engine_not_ready")
                assert int(answer.headers["retry-after"]) >= 1

    asyncio.run(main())


def test_a_hanging_step_ends_liveness_though_the_process_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.health.MAX_STALL_S", 0.2)

    async def main() -> None:
        async with serving() as served:
            hanging = asyncio.Event()
            loop = asyncio.get_running_loop()

            def hang(step: int) -> None:
                while not hanging.is_set() and not loop.is_closed():
                    time.sleep(0.02)

            served.executor.in_step = hang
            chat = asyncio.create_task(served.chat())
            await asyncio.sleep(0.1)
            assert (await served.answer("GET", "/health/live")).status == 200
            await asyncio.sleep(0.4)
            answer = await served.answer("GET", "/health/live")
            assert (answer.status, answer.code) == (503, "engine_stalled")
            assert (await served.answer("GET", "/health/ready")).status == 200, "pings are answered beside a step"
            hanging.set()
            assert (await chat).status == 200
            assert (await served.answer("GET", "/health/live")).status == 200

    asyncio.run(main())
