"""`EngineDriver`: runs the steps of an engine in one thread and takes commands from others between steps.

`AsyncLLM` runs one in a thread of its own, the engine's process one in its main thread. Next to read: `llm_engine.py`.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

from quire.engine.llm_engine import LLMEngine
from quire.engine.output_processor import Output
from quire.errors import EngineDeadError

_Result = TypeVar("_Result")


class EngineDriver:
    """The loop around `LLMEngine.step`. Only the thread in `run` touches the engine."""

    def __init__(self, engine: LLMEngine, deliver: Callable[[list[Output]], None]) -> None:
        """`deliver` gets the outputs of each step, in the engine's thread."""
        self.engine = engine
        self.is_stopping = False
        self._deliver = deliver
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` in the engine's thread before the next step. Raises: EngineDeadError after `close`."""
        with self._changed:
            if self._is_closed:
                self.engine.check_health()
                raise EngineDeadError("the engine was shut down: make a new one")
            self._inbox.append(command)
            self._changed.notify()
        self.engine.end_step_early()

    def call(self, function: Callable[[], _Result]) -> "Future[_Result]":
        """Run `function` like a command; the future gets its result. Raises: EngineDeadError after `close`."""
        future: Future[_Result] = Future()

        def command() -> None:
            # A cancelled future takes no result, but the function still runs.
            with suppress(InvalidStateError):
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self.post(command)
        return future

    def stop(self) -> None:
        """Make `run` return after the running step."""
        with self._changed:
            self.is_stopping = True
            self._changed.notify()
        self.engine.end_step_early()

    def run(self) -> None:
        """Run commands and steps until `stop`, or until the engine is dead."""
        engine = self.engine
        engine.watch_executor(self._lose)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._inbox or self.is_stopping or engine.errored or engine.has_unfinished_requests()
                )
                num_commands = len(self._inbox)
            for _ in range(num_commands):
                # One by one: if a command raises, those behind it stay for `close`.
                self._inbox.popleft()()
            if self.is_stopping or engine.errored:
                return
            if engine.has_unfinished_requests():
                self._deliver(engine.step())

    def _lose(self, error: EngineDeadError) -> None:
        """End the engine because its executor died, maybe while there is no step."""

        def command() -> None:
            if not self.engine.errored:
                self._deliver(self.engine.fail(error))

        with suppress(EngineDeadError):  # it ends anyway
            self.post(command)

    def close(self) -> None:
        """Refuse further commands and run those that wait: the engine, shut down or dead, refuses their requests."""
        with self._changed:
            self._is_closed = self.is_stopping = True
            commands, self._inbox = self._inbox, deque()
        for command in commands:
            with suppress(Exception):  # a command has told its own caller
                command()
