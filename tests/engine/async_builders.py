"""Scenarios around an `AsyncLLM`: played with a time limit, and with a hold on the engine in the middle of a step."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from quire.engine.async_llm import AsyncLLM
from quire.outputs import RequestOutput
from tests.engine.builders import ScriptedExecutor, assert_all_home, make_engine

LIMIT_S = 60
"""No scenario takes a second; this turns a hang into a failure."""


def play(scenario: Callable[..., Awaitable[None]], *arguments: Any, **options: Any) -> None:
    """Run `scenario(llm, executor)`; then everything must be free again."""
    engine, executor = make_engine(*arguments, **options)
    llm = AsyncLLM.from_engine(engine)

    async def bounded() -> None:
        await asyncio.wait_for(scenario(llm, executor), LIMIT_S)

    try:
        asyncio.run(bounded())
    finally:
        llm.shutdown()
    assert_all_home(engine)
    assert executor.is_shut_down


def make_test_of(play: Callable[..., None]) -> Callable[..., Any]:
    """Return the decorator that makes a test of a scenario; pytest gives it what follows the scenario's first two."""

    def played(*arguments: Any, **options: Any) -> Callable[..., Any]:
        def decorate(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
            @functools.wraps(scenario)
            def run(**given: Any) -> None:
                play(functools.partial(scenario, **given), *arguments, **options)

            signature = inspect.signature(scenario)
            own = list(signature.parameters.values())[2:]
            run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
            return run

        return decorate

    return played


played = make_test_of(play)


async def collect(llm: AsyncLLM, *arguments: Any, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(*arguments, **options)]


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class Gate:
    """Holds the engine in the middle of a step until the test has done what must come in between."""

    def __init__(self, executor: ScriptedExecutor, *, at_step: int) -> None:
        self._is_reached, self._is_open = threading.Event(), threading.Event()
        self._at_step = at_step
        executor.in_step = self._hold

    def _hold(self, step: int) -> None:
        if step == self._at_step:
            self._is_reached.set()
            assert self._is_open.wait(LIMIT_S)

    async def reached(self) -> None:
        await asyncio.to_thread(self._is_reached.wait, LIMIT_S)

    async def open_after(self, llm: AsyncLLM, num_commands: int) -> None:
        """Open once `num_commands` commands wait for the engine."""
        await wait_until(lambda: len(llm._driver._inbox) >= num_commands)
        self._is_open.set()

    def open(self) -> None:
        self._is_open.set()
